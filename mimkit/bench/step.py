"""The training step beside BEiT's, written plainly: time, MFU, memory. Equal losses come first."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mimkit.bench.machine import best, matmul_ceilings
from mimkit.bench.memory import peak_mib, saved_mib
from mimkit.bench.official import official_model
from mimkit.bench.our_step import OurUpdate, count_flops
from mimkit.bench.plain_step import PlainModel, PlainUpdate
from mimkit.bench.timing import Spread, clock_of, one_thread, race, ratios, spread
from mimkit.bench.workload import DROP_PATH, Workload, make_model, make_workload
from mimkit.errors import UserError
from mimkit.models.compiled import compile_blocks
from mimkit.models.matmul import Matmul, probe_matmul, use_onednn
from mimkit.models.mim import MaskedImageModel

PLAIN, OFFICIAL, OURS = "plain", "official", "mimkit"
CHECKPOINTED, COMPILED = "mimkit, checkpointing", "mimkit, compiled blocks"
_EQUAL = {False: 1e-5, True: 3e-2}  # relative, of loss and of every parameter's gradient
_PROOF_IMAGES = 2


@dataclass(frozen=True)
class Row:
    """One way of making an update.

    Attributes:
        seconds: of one update, in each round.
        saved_mib: kept for backward, an image.
        peak_mib: of an update, beyond weights, gradients, optimizer state and other ways' memory.
    """

    seconds: list[float]
    saved_mib: float
    peak_mib: float | None


@dataclass(frozen=True)
class Proof:
    """Relative differences between our step and the plain one, same weights, without drop path."""

    loss: float
    gradients: float  # L2, of the parameter where it is largest


@dataclass(frozen=True)
class Precision:
    """All ways in bf16, or all in float32."""

    bf16: bool
    matmul: Matmul
    proofs: dict[str, Proof]
    rows: dict[str, Row]

    def ratio(self, name: str) -> Spread:
        """Times as fast as the plain way."""
        return ratios(self.rows[PLAIN].seconds, self.rows[name].seconds)


@dataclass(frozen=True)
class Report:
    """What `measure` found. FLOPs are of an image: forward, and forward with backward."""

    size: str
    batch: int
    device: str
    forward_gflop: float
    step_gflop: float
    ceilings: dict[str, float]  # GFLOP/s
    onednn_speed: float  # of the probe, over torch's own
    precisions: list[Precision] = field(default_factory=list)

    def images_per_second(self, row: Row) -> Spread:
        return spread(self.batch / seconds for seconds in row.seconds)

    def mfu(self, row: Row, *, bf16: bool) -> float:
        """Of the median step, against the best rate of matrix products of this run."""
        rate = self.step_gflop * self.images_per_second(row).median
        return rate / best(self.ceilings, bf16=bf16)


def measure(
    size: str,
    *,
    batch: int,
    precisions: Sequence[bool],
    device: torch.device,
    rounds: int,
    compiled: bool = False,
    official: str | None = None,
    done: Callable[[], object] = lambda: None,
) -> Report:
    """Times the ways of making an update, in each of the precisions (True: bf16 autocast).

    Args:
        compiled: also with compiled blocks.
        official: folder of the official code, to be timed too; see `official_model`.
        done: called after each of `num_pieces` pieces of work.

    Raises:
        UserError: our step does not give the losses and gradients of the plain one.
    """
    work = make_workload(batch, device=device)
    forward, whole = count_flops(make_model(size, device="meta"))
    with one_thread():
        matmul, speed = probe_matmul() if device.type == "cpu" else ("torch", 0.0)
        ceilings = matmul_ceilings(
            make_model(size, device="meta").encoder.width, device=device, bf16=any(precisions)
        )
        done()
        found = [
            _precision(
                _Ways(size, work, bf16, "torch" if bf16 else matmul, compiled, official),
                rounds,
                done,
            )
            for bf16 in precisions
        ]
    return Report(size, batch, str(device), forward, whole, ceilings, speed, found)


def num_pieces(*, precisions: int, rounds: int, compiled: bool, official: bool) -> int:
    """Pieces of work of a `measure`."""
    ways = 3 + compiled + official
    return 1 + precisions * (1 + ways * (1 + rounds))


@dataclass(frozen=True)
class _Ways:
    """What is timed together."""

    size: str
    work: Workload
    bf16: bool
    matmul: Matmul
    compiled: bool
    official: str | None


def _precision(ways: _Ways, rounds: int, done: Callable[[], object]) -> Precision:
    work, bf16, matmul = ways.work, ways.bf16, ways.matmul
    model = make_model(ways.size)
    twins = {OURS: prepared(model, matmul)}
    if ways.compiled:
        twins[COMPILED] = prepared(model, matmul)
        compile_blocks(twins[COMPILED].encoder)
    proofs = {name: prove(model, twin, work, bf16=bf16) for name, twin in twins.items()}
    done()
    plain = {PLAIN: PlainUpdate(PlainModel(model, drop_path=DROP_PATH), work, bf16=bf16)}
    if ways.official is not None:
        theirs = official_model(ways.official, ways.size)
        plain[OFFICIAL] = PlainUpdate(theirs, work, bf16=bf16)
    ours = {name: OurUpdate(twin, work, bf16=bf16) for name, twin in twins.items()}
    works: dict[str, Callable[[], object]] = {**plain, **ours}
    works[CHECKPOINTED] = lambda: _checkpointed(ours[OURS])
    seconds = race(works, rounds=rounds, clock=clock_of(work.device), done=done)
    saved = _saved(plain, ours, work.device)
    rows = {
        name: Row(seconds[name], saved[name], peak_mib(works[name], device=work.device))
        for name in works
    }
    return Precision(bf16, matmul, proofs, rows)


def prepared(model: MaskedImageModel, matmul: Matmul) -> MaskedImageModel:
    """A copy that multiplies with this backend."""
    twin = copy.deepcopy(model)
    if matmul == "onednn":
        use_onednn(twin)
    return twin


def prove(model: MaskedImageModel, ours: MaskedImageModel, work: Workload, *, bf16: bool) -> Proof:
    """That both ways give the same loss and gradients from the same weights; see `measure`."""
    few = work.first(_PROOF_IMAGES)
    plain = PlainModel(model, drop_path=0)
    _, _, loss = PlainUpdate(plain, few, bf16=bf16).forward(few)
    loss.backward()  # type: ignore[no-untyped-call]
    found = OurUpdate(ours, few, bf16=bf16, drop_path=0).forward(few).loss
    found.backward()  # type: ignore[no-untyped-call]
    gradients = max(
        relative(one.grad, other.grad)
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True)
    )
    ours.zero_grad()
    proof = Proof(relative(found.detach(), loss.detach()), gradients)
    if not max(proof.loss, proof.gradients) <= _EQUAL[bf16]:
        raise UserError(
            f"our step and the plain one do not agree in {'bf16' if bf16 else 'fp32'}: the loss "
            f"differs by {proof.loss:.1e}, a gradient by {proof.gradients:.1e}; expected at most "
            f"{_EQUAL[bf16]:.0e}, or their speeds cannot be compared. Please report this with "
            "your versions of torch and timm"
        )
    return proof


def relative(value: Tensor | None, reference: Tensor | None) -> float:
    assert value is not None and reference is not None, "a parameter has no gradient"
    return float((value - reference).norm() / reference.norm())


@contextmanager
def checkpointing(model: MaskedImageModel) -> Iterator[None]:
    """Blocks are recomputed in backward, inside."""
    before = model.encoder.activation_checkpointing
    model.encoder.activation_checkpointing = True
    try:
        yield
    finally:
        model.encoder.activation_checkpointing = before


def _checkpointed(update: OurUpdate) -> None:
    with checkpointing(update.model):
        update()


def _saved(
    plain: dict[str, PlainUpdate], ours: dict[str, OurUpdate], device: torch.device
) -> dict[str, float]:
    work = make_workload(4, device=device)  # as many as `saved_mib` asks for

    def plainly(update: PlainUpdate) -> Callable[[int], Tensor]:
        return lambda size: update.forward(work.first(size))[2]

    def of(update: OurUpdate) -> Callable[[int], Tensor]:
        return lambda size: update.forward(work.first(size)).loss

    saved = {name: saved_mib(plainly(update), update.model) for name, update in plain.items()}
    saved |= {name: saved_mib(of(update), update.model) for name, update in ours.items()}
    with checkpointing(ours[OURS].model):
        saved[CHECKPOINTED] = saved_mib(of(ours[OURS]), ours[OURS].model)
    return saved
