"""DeepSpeed, for one process and for many; the only importer of deepspeed."""

import contextlib
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from mimkit.errors import UserError
from mimkit.registry import nearest
from mimkit.train.runtimes import (
    MOMENTS,
    RUNTIMES,
    Runtime,
    UpdateRule,
    plain_weights,
    start_moments,
)
from mimkit.train.runtimes._deepspeed_json import (
    KEYS,
    PRINTING,
    USELESS,
    check_effect,
    check_used,
    read_json,
)

# Top-level keys of a DeepSpeed JSON that change speed, memory or printing. DeepSpeed ignores a key
# it does not know, so anything else is refused.
_PASSED_ON = {
    "zero_optimization", "zero_force_ds_cpu_optimizer", *PRINTING, "communication_data_type",
    "prescale_gradients", "gradient_predivide_factor", "aio", "disable_python_gc",
}  # fmt: skip
_OURS = {
    "optimizer": "train.lr, train.weight_decay, train.betas and train.eps",
    "scheduler": "train.lr, train.min_lr and train.warmup",
    "bf16": "engine.precision=bf16",
    "fp16": "engine.precision=bf16 or fp32",
    "amp": "engine.precision=bf16",
    "activation_checkpointing": "engine.activation_checkpointing=true",
    "dataloader_drop_last": "nothing: the sample stream is endless",
    "checkpoint": "output.checkpoint_every: mimkit writes its own checkpoints",
    "elasticity": "nothing: any number of ranks that divides the batch can continue a run",
}


_NEVER = 1_000_000_000  # steps


def _single_process_environment() -> None:
    """What a launcher would set; DeepSpeed looks for MPI where nothing did."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # port 0: any free one  # fmt: skip
    os.environ.update(alone)


def _own_settings(rule: UpdateRule, world: int) -> dict[str, Any]:
    return {
        "train_batch_size": rule.micro_batch * rule.accumulation * world,
        "train_micro_batch_size_per_gpu": rule.micro_batch,
        "gradient_accumulation_steps": rule.accumulation,
        "gradient_clipping": rule.clip_grad,  # DeepSpeed clips to 1.0 where this is left out
        # 5e8, the default, makes every step fill gigabytes in deterministic mode
        "zero_optimization": {"stage": rule.zero_stage, "reduce_bucket_size": 50_000_000,
                              "allgather_bucket_size": 50_000_000},
        "torch_autocast": {"enabled": rule.bf16, "dtype": "bfloat16"},
        "steps_per_print": _NEVER,
    }  # fmt: skip


_NAMES = {  # where a contradiction is mended on our side
    "train_batch_size": "train.batch_size",
    "train_micro_batch_size_per_gpu": "train.batch_size / (ranks x engine.accumulation)",
    "gradient_accumulation_steps": "engine.accumulation",
    "gradient_clipping": "train.clip_grad",
    "zero_optimization.stage": "engine.zero_stage",
    "torch_autocast.enabled": "engine.precision",
    "torch_autocast.dtype": "engine.precision",
}
_FREE = {"zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size",
         "steps_per_print"}  # fmt: skip


def _merge_user(ours: dict[str, Any], user: dict[str, Any], file: Path, prefix: str = "") -> None:
    for key, value in user.items():
        full = prefix + key
        if isinstance(value, dict) and isinstance(ours.get(key), dict):
            _merge_user(ours[key], value, file, f"{full}.")
        elif key not in ours or full in _FREE:
            ours[key] = value
        elif isinstance(ours[key], dict):
            raise UserError(f"{file} has {full} = {value!r}, expected an object: {ours[key]!r}")
        elif ours[key] != value:
            raise UserError(
                f"{file} sets {full} to {value!r}, but {_NAMES[full]} makes it {ours[key]!r}; "
                "change one of them, or leave the key out of the JSON"
            )


def deepspeed_settings(rule: UpdateRule, *, world: int, on_cpu: bool = False) -> dict[str, Any]:
    """The dictionary DeepSpeed is started with: ours, with the user's JSON passed on as it is.

    Raises:
        UserError: the JSON contradicts the configuration, or holds what the engine would ignore.
    """
    ours = _own_settings(rule, world)
    if rule.deepspeed_config is None:
        return ours
    file = rule.deepspeed_config
    user = read_json(file)
    for key in user:
        if key in _OURS:
            raise UserError(f"{file} has '{key}', which mimkit sets itself; use {_OURS[key]}")
        if key not in _PASSED_ON | ours.keys() | USELESS.keys():
            known = sorted(_PASSED_ON | set(ours))
            raise UserError(
                f"{file} has '{key}', which DeepSpeed would ignore or mimkit does not support."
                f"{nearest(key, known)} Supported: {', '.join(known)}"
            )
    _merge_user(ours, user, file)
    _check_zero(ours["zero_optimization"], file)
    check_effect(user, stage=rule.zero_stage, on_cpu=on_cpu, file=file)
    return ours


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of an optimizer; at stage 1 and above its parameters are flat shards of this rank."""
    numbers = {key: value for key, value in group.items() if key != "params"}
    return {**numbers, "elements": sum(p.numel() for p in group["params"])}


def _check_zero(settings: dict[str, Any], file: Path) -> None:
    """DeepSpeed's own check of the section, before any work instead of at the engine's start."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**settings)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, p['loc']))}: {p['msg']}."
                    f"{nearest(str(p['loc'][-1]), sorted(KEYS)) if 'Extra' in p['msg'] else ''}"
                    for p in error.errors()]  # fmt: skip
        raise UserError(f"{file}, zero_optimization: {' '.join(problems)}") from error


@RUNTIMES.register
class DeepSpeedRuntime(Runtime):
    """ZeRO stages 0-3 on gloo or nccl, under `deepspeed`, `torchrun` or no launcher.

    Args:
        timeout: minutes that a rank waits for the others before it says so and ends.
    """

    def __init__(self, *, timeout: float = 30) -> None:
        # torch 2.14 deprecates collectives that ZeRO still calls; the user can do nothing about it
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it prints a warning in each process
        import deepspeed
        import deepspeed.ops
        from deepspeed.accelerator import get_accelerator

        deepspeed.utils.logger.setLevel(logging.ERROR)
        _single_process_environment()
        if get_accelerator().device_name() == "cpu":
            # init would compile an op that only inference uses: a minute and a compiler
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        try:
            deepspeed.init_distributed(verbose=False, timeout=timedelta(minutes=timeout))
        except dist.DistNetworkError as error:
            raise UserError(
                f"the ranks cannot meet at port {os.environ.get('MASTER_PORT')}: another job uses "
                "it, or a firewall closes it. Give each job on a machine a port of its own: "
                f"deepspeed --master_port N ... ({str(error).splitlines()[0]})"
            ) from error
        except dist.DistStoreError as error:
            raise UserError(
                f"not all of the {os.environ.get('WORLD_SIZE')} ranks came within "
                f"engine.timeout={timeout:g} minutes: {str(error).splitlines()[0]} The reason is "
                "what the others said, or a machine was not started; if they are only slow to "
                "start, set engine.timeout higher"
            ) from error
        except RuntimeError as error:
            if "connectFullMesh" not in str(error):
                raise
            raise UserError(
                f"the ranks met at port {os.environ.get('MASTER_PORT')} but cannot connect: other "
                "jobs meet there (give each a port of its own: deepspeed --master_port N ..., or "
                "MASTER_PORT), or the name of a machine leads to its loopback (set "
                f"GLOO_SOCKET_IFNAME). ({str(error).splitlines()[0]})"
            ) from error
        self._deepspeed = deepspeed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
        self.local_world = int(local or self.world)  # deepspeed sets the first, torchrun the second
        if get_accelerator().device_name() != "cpu":
            get_accelerator().set_device(self.local_rank)
        self.device = torch.device(get_accelerator().current_device_name())
        # what ranks tell each other every update must not wait for a GPU
        on_gpu = self.device.type != "cpu" and self.world > 1
        self._between_cpus: Any = dist.new_group(backend="gloo") if on_gpu else None

    def check(self, rule: UpdateRule) -> None:
        self._settings_for(rule)

    def _settings_for(self, rule: UpdateRule) -> dict[str, Any]:
        return deepspeed_settings(rule, world=self.world, on_cpu=self.device.type == "cpu")

    def prepare(self, model: nn.Module, optimizer: Optimizer, rule: UpdateRule) -> None:
        self._settings = self._settings_for(rule)
        if any(self._settings.get(key) not in (None, False, _NEVER) for key in PRINTING):
            self._deepspeed.utils.logger.setLevel(logging.INFO)  # it prints by its logger
        self._stage = self._settings["zero_optimization"]["stage"]
        if self._stage and not isinstance(optimizer, torch.optim.AdamW):
            raise UserError(
                f"engine.zero_stage={self._stage} cuts weights into flat pieces, but "
                f"{type(optimizer).__name__} needs them whole (it looks at the norm of each); set "
                "engine.zero_stage=0, or choose adamw"
            )
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._engine: Any = self._deepspeed.initialize(
            model=model, optimizer=optimizer, config=self._settings, dist_init_required=False
        )[0]
        self.module, self.model = model, self._engine
        self._optimizer = optimizer
        used = self.effective_settings()["used"]
        check_used(self._settings, used, version=self._deepspeed.__version__)
        self._start_moments(updates=0)

    def _start_moments(self, *, updates: int) -> None:
        """State for what the stage really optimizes: parameters, or flat shards of them.

        torch makes it in the first step, which is too late to restore into, and lets stages 1
        and 2 link only the first group's.
        """
        if self._stage == 0:
            start_moments(self._optimizer, list(self._trained.values()), updates=updates)
            return
        zero = self._engine.optimizer
        if self._stage == 3:
            start_moments(self._optimizer, zero.fp32_partitioned_groups_flat, updates=updates)
            return
        start_moments(self._optimizer, zero.single_partition_of_fp32_groups, updates=updates)
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)
        updates = self._engine.is_gradient_accumulation_boundary()
        if updates and not self._stage:
            self._look_before_step()
        self._engine.step()
        if updates and self._stage:
            self._look_after_step()
        elif updates and not self.applied:
            self._engine.set_gradient_accumulation_boundary(None)  # it counts again by itself
            self._engine.zero_grad()

    def _look_before_step(self) -> None:
        """Stage 0 clips and forgets the norm, and steps with whatever it is."""
        gradients = [p.grad for p in self._trained.values() if p.grad is not None]
        self.grad_norm = nn.utils.get_total_norm(gradients)
        self.applied = math.isfinite(self.grad_norm)
        if not self.applied:
            self._engine.set_gradient_accumulation_boundary(False)  # then `step` only counts

    def _look_after_step(self) -> None:
        """The other stages tell the norm after the step, which they leave out where it is inf."""
        self.applied = self._engine.was_step_applied()
        norm = float(self._engine.get_global_grad_norm()) if self.applied else math.nan
        self.grad_norm = torch.tensor(norm)

    def weights(self) -> dict[str, Tensor]:
        if self._stage < 3:
            return plain_weights(self._engine.module)
        with self._deepspeed.zero.GatheredParameters(list(self._engine.module.parameters())):
            return plain_weights(self._engine.module)

    def moments(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        found = {}
        for name, parameter in self._trained.items():
            for key in MOMENTS:
                if self._stage == 0:
                    whole = self._optimizer.state[parameter][key]
                else:
                    whole = safe_get_full_optimizer_state(parameter, key)
                found[f"{name}/{key}"] = whole.detach().float().cpu().clone()
        return found

    def restore(self, moments: Mapping[str, Tensor], *, updates: int) -> None:
        self._start_moments(updates=updates)
        for name, parameter in self._trained.items():
            for key in MOMENTS:
                self._set_moment(parameter, moments[f"{name}/{key}"].to(self.device), key)

    def _set_moment(self, parameter: Any, value: Tensor, key: str) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self._stage == 0:
            self._optimizer.state[parameter][key].copy_(value)
        elif self._stage < 3:
            safe_set_full_optimizer_state(parameter, value, key)
        else:  # the setter of whole tensors fails where the last rank's shard is padded
            safe_set_local_optimizer_state(parameter, self._shard(parameter, value), key)

    def _shard(self, parameter: Any, whole: Tensor) -> Tensor:
        """This rank's of a tensor that ZeRO stage 3 holds as `parameter`."""
        size = parameter.ds_tensor.ds_numel
        padded = nn.functional.pad(whole.flatten(), (0, size * self.world - whole.numel()))
        return padded[size * self.rank :][:size]

    def parts(self) -> dict[str, Tensor]:
        sharded = self._stage == 3
        return {name: parameter.ds_tensor.data if sharded else parameter.data  # type: ignore[attr-defined]
                for name, parameter in self._trained.items()}  # fmt: skip

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        parameter: Any = self._trained[name]
        if self._stage == 3:
            part = self._shard(parameter, whole)
            return part.to(parameter.ds_tensor.device, torch.float32, copy=True)
        return whole.to(parameter.device, torch.float32, copy=True)

    @contextlib.contextmanager
    def writing_parts(self) -> Iterator[None]:
        """Stage 3 keeps small parameters whole, and others for a while: those are made anew."""
        if self._stage < 3:
            yield
            return
        zero = self._engine.optimizer
        zero._partition_all_parameters()
        yield
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def sum(self, tensor: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        if self.world == 1:
            return flag
        votes = torch.tensor(int(flag))
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._between_cpus)
        return bool(votes)

    def gather(self, value: Any) -> list[Any]:
        box: list[Any] = [None] * self.world
        dist.all_gather_object(box, value)
        return box

    def from_rank_0(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def effective_settings(self) -> dict[str, Any]:
        """Given: what DeepSpeed was started with. Used: what it says itself that it runs with."""
        engine = self._engine
        used = {
            "train_batch_size": engine.train_batch_size(),
            "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "gradient_clipping": engine.gradient_clipping(),
            "zero_optimization": engine._config.zero_config.model_dump(mode="json"),
            "torch_autocast": {"enabled": engine.torch_autocast_enabled(),
                               "dtype": str(engine.torch_autocast_dtype()).split(".")[-1]},
            "communication_dtype": str(engine.communication_data_type),
            "prescale_gradients": not engine.postscale_gradients(),
            "gradient_predivide_factor": engine.gradient_predivide_factor(),
            "scheduler": engine.lr_scheduler and type(engine.lr_scheduler).__name__,
            "engine_optimizer": type(engine.optimizer).__name__,
            "optimizer": type(engine.basic_optimizer).__name__,
            "groups": [_group(group) for group in engine.basic_optimizer.param_groups],
        }  # fmt: skip
        return {"runtime": "deepspeed", "world_size": self.world, "given": self._settings,
                "used": used}  # fmt: skip

    def _parts_are_new(self) -> None:
        if self._stage:
            self._engine.optimizer.refresh_fp32_params()

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()
