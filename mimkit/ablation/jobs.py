"""What the processes of a study do: fill a token bank, train one run and judge it."""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from mimkit import build
from mimkit.ablation.evaluation import Probing, evaluate
from mimkit.ablation.machine import Slot
from mimkit.ablation.plan import Plan, Run
from mimkit.ablation.processes import end_with_this_process
from mimkit.audit.of_run import RunAudits, audit_tokenizer
from mimkit.banks import fill, halves
from mimkit.config import Config, differences, to_yaml
from mimkit.errors import Interrupted, UserError
from mimkit.files import write_text
from mimkit.ports import free_port

_RANKS_GRACE = 40.0  # seconds; DeepSpeed's launcher kills its ranks after 30


@dataclass(frozen=True)
class SharedBank:
    """Tokens of runs that see the same crops of the same images with the same tokenizer."""

    folder: Path
    runs: tuple[Run, ...]

    @property
    def config(self) -> Config:
        """Of one of them; what it differs in from the others changes no token."""
        return self.runs[0].config

    @property
    def seed(self) -> int:
        """Of the crops."""
        return self.config.data.seed_of_views(self.runs[0].seed)

    def epochs(self, length: int) -> int:
        """That the longest of its runs sees.

        Args:
            length: images of an epoch.
        """
        trains = [run.config.train for run in self.runs]
        return max(math.ceil(build.num_steps(train, length) * train.batch_size / length)
                   for train in trains)  # fmt: skip

    def done(self, epochs: int) -> bool:
        return done_file(self.folder, epochs).exists()


def shared_banks(plan: Plan, runs: Sequence[Run]) -> list[SharedBank]:
    """What these runs share; those whose targets are no words have none."""
    found: dict[Path, list[Run]] = {}
    for run in (run for run in runs if run.opened.words):
        data, seed = run.config.data, run.config.data.seed_of_views(run.seed)
        bound = [data.model_dump(mode="json"), run.config.tokenizer.model_dump(),
                 run.opened.facts, seed]  # fmt: skip
        text = json.dumps(bound, sort_keys=True)
        name = f"seed{seed}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        found.setdefault(plan.folder / "banks" / name, []).append(run)
    return [SharedBank(folder, tuple(those)) for folder, those in found.items()]


def fill_bank(config: Config, folder: Path, epochs: int) -> None:
    """Tokens of so many epochs; the tokenizer is looked at first."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = build.build_tokenizer(config).to(device)
    train, heldout = build.build_data(config.data)
    found = audit_tokenizer(tokenizer, train, config.data, name=config.tokenizer.name,
                            seed=config.seed, device=device)  # fmt: skip
    audits = RunAudits([], found)
    print(audits.say(), flush=True)
    audits.save(folder.with_name(f"{folder.name}-audits"))
    for half in halves(config, tokenizer, train, heldout):
        count = epochs if half.name == "train" else 1
        fill(half, folder, tokenizer, epochs=count, device=device)
    write_text(done_file(folder, epochs), "")


def done_file(bank: Path, epochs: int) -> Path:
    """Says that a bank has this many epochs."""
    return bank / f".{epochs}-epochs"


def at_home(run: Run, *, bank: Path | None, threads: int | None) -> Config:
    """The configuration of a run with its place and its share of the machine; same science."""
    config = run.config
    engine = {"token_bank": None if bank is None else str(bank)}
    if threads is not None and config.engine.threads is None:
        engine["threads"] = threads  # type: ignore[assignment]
    return config.model_copy(
        update={
            "engine": config.engine.model_copy(update=engine),
            "output": config.output.model_copy(update={"dir": str(run.folder)}),
        }
    )


def as_planned(run: Run, action: Callable[..., None], arguments: dict[str, object]) -> None:
    """`action`, by the code that the run's identity stands for.

    Raises:
        UserError: a part of the user's own was edited since the study was planned.
    """
    if changed := differences(run.code, build.code_digests(run.config)):
        raise UserError(f"edited since the study began: {'; '.join(changed)}. Give the command "
                        "again for runs of the new code, or restore the old")  # fmt: skip
    action(**arguments)


def pretrain_and_probe(config: Config, slot: Slot, probing: Probing | None) -> None:
    """Begins, continues, or finds finished; then every probe that is not made yet."""
    folder = Path(config.output.dir or "")
    if slot.ranks > 1:
        written = folder.parent.parent / "configs" / f"{folder.name}.yaml"
        write_text(written, to_yaml(config))
        launch(["pretrain", "--config", str(written)], slot)
    else:
        from mimkit.pretraining import run

        run(config, started_at=time.time())
    if probing is not None:
        evaluate(config, folder, probing)


def launch(words: Sequence[str], slot: Slot) -> None:
    """`deepspeed --module mimkit WORDS` on all ranks of a slot.

    They are a group of their own: told to stop, DeepSpeed's launchers would leave before the ranks
    have saved, and nobody would wait for those.

    Raises:
        UserError: it failed; what it said is in the log.
        Interrupted: this process was asked to stop; all of them have ended.
    """
    ranks = [] if slot.devices else [f"--num_accelerators={slot.ranks}"]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *ranks,
               f"--master_port={free_port()}", "--module", "mimkit", *words]  # fmt: skip
    group = subprocess.Popen(
        command,
        preexec_fn=end_with_this_process,  # noqa: PLW1509  (it takes no lock of another thread)
        start_new_session=True,
    )
    try:
        code = group.wait()
    except (Interrupted, KeyboardInterrupt) as asked:
        _end_group(group)
        if isinstance(asked, Interrupted):
            raise Interrupted(asked.signal, "its ranks were told, and have left") from None
        raise
    if code:
        raise UserError(f"{' '.join(words)} ended with exit code {code}")


def _end_group(group: "subprocess.Popen[bytes]") -> None:
    """SIGTERM to launchers and ranks, SIGKILL where one is left after some time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(group.pid, number)
        end = time.monotonic() + _RANKS_GRACE
        while time.monotonic() < end:
            group.poll()  # or the launcher would stay as what it left
            try:
                os.killpg(group.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
