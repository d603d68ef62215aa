"""Which kernels the model of a run computes with: one choice, for every rank and every resume."""

import json

import torch
from torch import nn

from mimkit.config import EngineConfig
from mimkit.models.compiled import check_compiler, compile_blocks
from mimkit.models.encoder import Encoder
from mimkit.models.matmul import Matmul, probe_matmul, use_onednn
from mimkit.runs import RunFolder
from mimkit.session import Session


def check_kernels(engine: EngineConfig) -> None:
    """UserError, before any work, where engine.compile asks for what this machine cannot do."""
    if engine.compile == "block":
        check_compiler(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def choose_kernels(
    model: nn.Module, encoder: Encoder, *, engine: EngineConfig, session: Session
) -> dict[str, str]:
    """Makes `model`, of which `encoder` is a part, use what the engine's settings say.

    All ranks must call it, before the engine takes the model. Rank 0 measures; a run that goes on
    takes what it was begun with, so that it ends as if it had never stopped.

    Returns:
        What was chosen and is not torch's own way: facts of the run, which `write_start` compares.
    """
    matmul: Matmul = session.runtime.from_rank_0(
        _matmul(engine, session) if session.is_first else None
    )
    if matmul == "onednn":
        use_onednn(model)
    if engine.compile == "block":
        compile_blocks(encoder)
    chosen = {"matmul": matmul, "compile": str(engine.compile)}
    return {name: value for name, value in chosen.items() if value not in ("torch", "False")}


def _matmul(engine: EngineConfig, session: Session) -> Matmul:
    """oneDNN multiplies float32 on a CPU, uncompiled; anything else is torch's work."""
    on_cpu = session.runtime.device.type == "cpu" and not session.rule.bf16
    if engine.matmul == "torch" or engine.compile == "block" or not on_cpu:
        return "torch"
    return _begun_with(session.folder) or probe_matmul()[0]


def _begun_with(folder: RunFolder) -> Matmul | None:
    """Of a run that goes on; one that was begun before there was a choice has torch's."""
    if folder.continues is None:
        return None
    run = folder.continues.parents[1]  # of the checkpoint, where a replay has another folder
    start = json.loads((run / "run.json").read_text(encoding="utf-8"))
    return "onednn" if start["facts"].get("matmul") == "onednn" else "torch"
