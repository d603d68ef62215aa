"""`mimkit VERB ...`: one file a verb; `tools/VERB.py` are second doors to the same functions."""

import importlib
import os
import pkgutil
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NoReturn

from mimkit import __version__
from mimkit.errors import Interrupted, ToldByAnotherError, UserError
from mimkit.interrupts import exit_code, ignore_signals, interruptible
from mimkit.registry import nearest

# How gloo and nccl say that the other end of a connection is gone.
_LOST = ("losed by peer", "eset by peer", "Broken pipe", "remote process exited")
_TIMED_OUT = ("imed out waiting", "collective operation timeout", "pplication timeout")


_RESUMED = {
    "ablate_stems": "; the same command goes on where it was",
    "finetune": "; the same command continues from the last checkpoint",
    "pretrain": "; the same command continues from the last checkpoint",
    "train_tokenizer": "; the same command continues from the last checkpoint",
    "make_shards": "; the same command goes on where it was",
    "make_tokens": "; the same command goes on where it was",
}
_PATIENCE = 15  # seconds that a rank waits for rank 0 to speak
_MOMENT = 3  # seconds: longer than the rank that speaks needs to end by itself


def verbs() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code: 0 done, 2 something the user can mend, 130 Ctrl-C, 75
    stopped by a signal in good order."""
    # Before torch loads OpenMP: threads that spin at barriers make a shared CPU 10 x slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["--version"], ["version"]):
        print(f"mimkit {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    verb = words[0].replace("-", "_")
    try:
        if verb not in verbs():
            raise UserError(
                f"there is no verb '{words[0]}'.{nearest(verb, verbs())} "
                f"Verbs: {', '.join(verbs())}"
            )
        run = importlib.import_module(f"mimkit.cli.{verb}").main
        with interruptible() if verb in _RESUMED else nullcontext():
            code: int = run(words[1:])
        return code
    except ToldByAnotherError:
        time.sleep(_MOMENT)  # that one speaks, and the launcher ends all with the first
        return 2
    except Interrupted as interruption:
        if int(os.environ.get("RANK", "0")):
            time.sleep(_MOMENT)  # rank 0 speaks for all, and the launcher ends all with the first
        else:
            _complain(f"stopped by {interruption.signal}: {interruption.done}{_RESUMED[verb]}")
        return exit_code(interruption.signal)
    except UserError as error:
        _complain(str(error))
        return 2
    except RuntimeError as error:
        if not _ranks_have_met() or (why := _lost(str(error))) is None:
            raise
        if int(os.environ.get("RANK", "0")):
            time.sleep(_PATIENCE)  # rank 0 says the same, and the launcher ends all
        _complain(f"{why}{_RESUMED.get(verb, '')}")
        return 2
    except BrokenPipeError:  # `... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except KeyboardInterrupt:
        _complain(f"interrupted{_RESUMED.get(verb, '')}")
        return 130


def door(argv: Sequence[str] | None = None) -> NoReturn:
    """`main` as a process: ends it with the exit code.

    A rank, also one that is alone, skips the interpreter's teardown. There, C++ threads of process
    groups can abort a rank that has finished ("terminate called without an active exception", exit
    code -6: seen once in some twenty runs under torchrun, and once without a launcher on a machine
    with nine busy processes), and a launcher then ends the others too.
    """
    code = main(argv)
    if code in map(exit_code, ("SIGTERM", "SIGINT")):
        ignore_signals()  # a second one, in the teardown, would put a code of its own in its place
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:  # of a launcher, or of DeepSpeed's runtime without one
        os._exit(code)
    sys.exit(code)


def _complain(text: str) -> None:
    """One paragraph. What every rank finds wrong before they meet, rank 0 says for all.

    The others wait for it: the end of one rank makes the launcher end all, so one that left at once
    could silence rank 0. Who is still there afterwards found something that is wrong for it alone.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank and not _ranks_have_met():
        time.sleep(_PATIENCE)
    name = f"mimkit (rank {rank})" if rank else "mimkit"
    sys.stdout.flush()
    print("\n" + textwrap.fill(f"{name}: {text}", 100, break_long_words=False,
                               break_on_hyphens=False), file=sys.stderr, flush=True)  # fmt: skip


def _lost(error: str) -> str | None:
    """What an error of gloo or nccl means, if it is about another rank."""
    if any(words in error for words in _LOST):
        return (
            "another rank ended before this one; the reason is what it said. If it said nothing, "
            "it was killed: by hand, or because memory ran out (dmesg tells)"
        )
    if any(words in error for words in _TIMED_OUT):
        return (
            "a rank did not answer within engine.timeout minutes: it hangs, is much slower than "
            f"the others, or its machine is gone ({error.splitlines()[0]})"
        )
    return None


def _ranks_have_met() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def _help() -> str:
    lines = ["usage: mimkit VERB [...]   (mimkit VERB --help tells more)", ""]
    for verb in verbs():
        doc = importlib.import_module(f"mimkit.cli.{verb}").__doc__ or ""
        lines.append(f"  {verb:16} {doc.strip().splitlines()[0]}")
    return "\n".join(lines)
