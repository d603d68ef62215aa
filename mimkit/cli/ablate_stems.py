"""Compare patch stems: arms x seeds, paired, with uncertainty, on one page.

  tools/ablate_stems.py --preset quick               five stems, three seeds, embedded data
  tools/ablate_stems.py --preset quick --dry-run     what would be run, how long, how much disk
  tools/ablate_stems.py --preset medium settings.data.train=DIR/train-*.tar \\
      settings.data.heldout=DIR/val-*.tar
  tools/ablate_stems.py --config mine.yaml seeds=[0,1,2,3,4] arms.levit=null --jobs 2
  tools/ablate_stems.py --compare runs/stems-quick runs/other
  tools/ablate_stems.py --self-test                  is the harness itself to be believed?

The default is the paper's Table 7. The same command goes on after an interruption, and with more
arms or seeds: what is finished is used again. Each run is a process of its own with DeepSpeed. A
run that fails does not stop the others; it is in the report, and the exit code is 1.
"""

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from mimkit.cli._arguments import check_range, find_config, parse, training_parser
from mimkit.config import StudyConfig, load_study_config, to_yaml
from mimkit.errors import UserError

if TYPE_CHECKING:  # they are slow to import, and --help does not need them
    from mimkit.ablation.machine import Slot
    from mimkit.ablation.study import Prepared

_DEFAULT = "stems/study"
_PRESETS = ("quick", "medium", "study", "parallel", "attention")


def main(argv: Sequence[str]) -> int:
    arguments = parse(_parser(), argv)
    check_range(arguments, jobs=(1, 64), ranks=(1, 64))
    _check_options(arguments)
    if arguments.compare:
        return _compare(*arguments.compare)
    study = load_study_config(_config_file(arguments), arguments.overrides)
    if arguments.print_config:
        print(to_yaml(study), end="")
        return 0
    return _run(study, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = training_parser("ablate_stems", __doc__ or "", _DEFAULT)
    parser.add_argument("--preset", choices=_PRESETS, help="one of configs/stems/")
    parser.add_argument("--dry-run", action="store_true",
                        help="plan, check pairing, estimate time and disk, and stop")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, metavar="N",
                        help="runs at a time; GPUs or cores are divided (default: 1)")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, metavar="R",
                        help="ranks of each run, one a GPU (default: 1)")  # fmt: skip
    parser.add_argument("--report", action="store_true",
                        help="write the report of what is finished, and train nothing")  # fmt: skip
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"),
                        help="two studies, or their report.json, side by side")  # fmt: skip
    parser.add_argument("--self-test", action="store_true",
                        help="false alarms of an A/A study, and a stem that must lose")  # fmt: skip
    return parser


def _check_options(arguments: argparse.Namespace) -> None:
    """UserError where one option would leave another without effect."""
    modes = ("dry_run", "report", "compare", "self_test")
    given = [f"--{mode.replace('_', '-')}" for mode in modes if getattr(arguments, mode)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} ask for different things; give one of them")
    named = [f"--{name} {value}" for name, value in (("preset", arguments.preset),
             ("config", arguments.config)) if value not in (None, _DEFAULT)]  # fmt: skip
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)} both name a study; give one of them")
    if arguments.self_test and named:
        raise UserError(f"--self-test is a study of its own, configs/stems/self_test.yaml; leave "
                        f"{named[0]} out (settings, as in seeds=[0,1], are for it)")  # fmt: skip
    if arguments.compare and (rest := [*named, *arguments.overrides]):
        raise UserError(f"--compare takes two studies that are there; leave {rest[0]} out")


def _config_file(arguments: argparse.Namespace) -> Path:
    if arguments.self_test:
        return find_config("stems/self_test")
    return find_config(f"stems/{arguments.preset}" if arguments.preset else arguments.config)


def _run(study: StudyConfig, arguments: argparse.Namespace) -> int:
    from mimkit.ablation.machine import machine_slots
    from mimkit.ablation.self_test import self_test
    from mimkit.ablation.study import alone

    slots = machine_slots(jobs=arguments.jobs, ranks=arguments.ranks,
                          visible=os.environ.get("CUDA_VISIBLE_DEVICES"))  # fmt: skip
    trains = arguments.self_test or not (arguments.dry_run or arguments.report)
    with alone(study) if trains else nullcontext():
        if arguments.self_test:
            return 0 if self_test(study, slots, say=_say) else 1
        return _study(study, slots, arguments)


def _study(study: StudyConfig, slots: "list[Slot]", arguments: argparse.Namespace) -> int:
    from mimkit.ablation.study import prepare, report_study, run_study

    prepared = prepare(study, slots, say=_say)
    _announce(prepared)
    if arguments.dry_run:
        prepared.check_disk()
        return 1 if prepared.failures else 0
    failures = [] if arguments.report else run_study(prepared, slots, say=_say)
    record, page = report_study(prepared, failures)
    print("\n" + "\n".join(record["verdict"]["sentences"]))
    print(f"\nreport: {page}, report.md, report.csv and report.json beside it")
    failed = failures or prepared.failures or (record["missing"] and not arguments.report)
    return 1 if failed else 0


def _announce(prepared: "Prepared") -> None:
    plan = prepared.plan
    print(f"{plan.study.name}: {len(plan.arms)} arms x {len(plan.study.seeds)} seeds, in "
          f"{plan.folder}; {prepared.estimate}")  # fmt: skip
    reference = prepared.costs[plan.study.reference]
    for arm, config in plan.arms.items():
        cost = prepared.costs[arm]
        differs = f"; also differs: {'; '.join(plan.confounds[arm])}" if plan.confounds[arm] else ""
        print(f"  {arm:20} {config.stem.name:10} FLOPs x{cost.gflops / reference.gflops:.2f}, time "
              f"x{cost.ms_train / reference.ms_train:.2f}{differs}")  # fmt: skip
    for regime, steps in plan.steps.items():
        print(f"  steps of {regime} by budget={plan.study.budget}: "
              f"{', '.join(f'{arm} {number}' for arm, number in steps.items())}")  # fmt: skip
    for failure in prepared.failures:
        print(f"  {failure.arm:20} is left out, {failure.what} failed: {failure.error} "
              f"(all of it: {failure.log})")  # fmt: skip
    for one in prepared.pairing:
        print(f"  paired: {one.arm} with {plan.study.reference} in {', '.join(one.equal)}; "
              f"{one.weights_equal} of {one.weights_alike} initial tensors of equal shape are equal"
              f"{'; different: ' + ', '.join(one.different) if one.different else ''}")  # fmt: skip


def _compare(one: Path, other: Path) -> int:
    from mimkit.ablation.compare import compare_reports
    from mimkit.ablation.report import load_record

    print(compare_reports(load_record(one), load_record(other)))
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
