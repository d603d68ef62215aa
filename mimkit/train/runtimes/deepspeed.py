"""DeepSpeed, for one process and for many; the only importer of deepspeed."""

import json
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.registry import nearest
from mimkit.train.runtimes import MOMENTS, RUNTIMES, Runtime, UpdateRule, plain_weights, start_adamw

# Top-level keys of a DeepSpeed JSON that change speed, memory or printing. DeepSpeed ignores a key
# it does not know, so anything else is refused.
_PASSED_ON = {
    "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger",
    "flops_profiler", "communication_data_type", "prescale_gradients", "gradient_predivide_factor",
    "disable_allgather", "aio", "timers", "compile", "disable_python_gc",
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
        "steps_per_print": 1_000_000_000,
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


def deepspeed_settings(rule: UpdateRule, *, world: int) -> dict[str, Any]:
    """The dictionary DeepSpeed is started with: ours, with the user's JSON passed on as it is.

    Raises:
        UserError: the JSON contradicts the configuration, or holds what the engine would ignore.
    """
    ours = _own_settings(rule, world)
    if rule.deepspeed_config is None:
        return ours
    file = rule.deepspeed_config
    try:
        user = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"engine.deepspeed_config: cannot read {file}: {error}") from error
    if not isinstance(user, dict):
        raise UserError(f"engine.deepspeed_config: {file} holds no JSON object")
    for key in user:
        if key in _OURS:
            raise UserError(f"{file} has '{key}', which mimkit sets itself; use {_OURS[key]}")
        if key not in _PASSED_ON and key not in ours:
            known = sorted(_PASSED_ON | set(ours))
            raise UserError(
                f"{file} has '{key}', which DeepSpeed would ignore or mimkit does not support."
                f"{nearest(key, known)} Supported: {', '.join(known)}"
            )
    _merge_user(ours, user, file)
    _check_zero(ours["zero_optimization"], file)
    return ours


def _check_zero(settings: dict[str, Any], file: Path) -> None:
    """DeepSpeed's own check of the section, before any work instead of at the engine's start."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**settings)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
        raise UserError(f"{file}, zero_optimization: {'; '.join(problems)}") from error


@RUNTIMES.register
class DeepSpeedRuntime(Runtime):
    """ZeRO stages 0-3 on gloo or nccl, under `deepspeed`, `torchrun` or no launcher."""

    def __init__(self) -> None:
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
            deepspeed.init_distributed(verbose=False)
        except dist.DistNetworkError as error:
            raise UserError(
                f"the ranks cannot meet at port {os.environ.get('MASTER_PORT')}: another job uses "
                "it, or a firewall closes it. Give each job on a machine a port of its own: "
                f"deepspeed --master_port N ... ({str(error).splitlines()[0]})"
            ) from error
        self._deepspeed = deepspeed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
        self.local_world = int(local or self.world)  # deepspeed sets the first, torchrun the second
        if get_accelerator().device_name() != "cpu":
            get_accelerator().set_device(self.local_rank)
        self.device = torch.device(get_accelerator().current_device_name())

    def check(self, rule: UpdateRule) -> None:
        deepspeed_settings(rule, world=self.world)

    def prepare(self, model: nn.Module, optimizer: torch.optim.AdamW, rule: UpdateRule) -> None:
        self._settings = deepspeed_settings(rule, world=self.world)
        self._stage = self._settings["zero_optimization"]["stage"]
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._engine: Any = self._deepspeed.initialize(
            model=model, optimizer=optimizer, config=self._settings, dist_init_required=False
        )[0]
        self.model = self._engine
        self._adamw = optimizer
        self._start_adamw(updates=0)

    def _start_adamw(self, *, updates: int) -> None:
        """State for what the stage really optimizes: parameters, or flat shards of them.

        torch makes it in the first step, which is too late to restore into, and lets stages 1
        and 2 link only the first group's.
        """
        if self._stage == 0:
            start_adamw(self._adamw, list(self._trained.values()), updates=updates)
            return
        zero = self._engine.optimizer
        if self._stage == 3:
            start_adamw(self._adamw, zero.fp32_partitioned_groups_flat, updates=updates)
            return
        start_adamw(self._adamw, zero.single_partition_of_fp32_groups, updates=updates)
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)
        if self._engine.is_gradient_accumulation_boundary():
            self.grad_norm = self._norm_before_step()
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        if self._stage and norm is not None:  # -1 is its word for a norm that is not finite
            self.grad_norm = torch.as_tensor(float(norm) if norm >= 0 else float("nan"))

    def _norm_before_step(self) -> Tensor | None:
        """Stage 0 clips and forgets the norm; the others tell it after the step."""
        if self._stage:
            return self.grad_norm
        gradients = [p.grad for p in self._trained.values() if p.grad is not None]
        return nn.utils.get_total_norm(gradients)

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
                    whole = self._adamw.state[parameter][key]
                else:
                    whole = safe_get_full_optimizer_state(parameter, key)
                found[f"{name}/{key}"] = whole.detach().float().cpu().clone()
        return found

    def restore(self, moments: Mapping[str, Tensor], *, updates: int) -> None:
        self._start_adamw(updates=updates)
        for name, parameter in self._trained.items():
            for key in MOMENTS:
                self._set_moment(parameter, moments[f"{name}/{key}"].to(self.device), key)

    def _set_moment(self, parameter: Any, value: Tensor, key: str) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self._stage == 0:
            self._adamw.state[parameter][key].copy_(value)
        elif self._stage < 3:
            safe_set_full_optimizer_state(parameter, value, key)
        else:  # the setter of whole tensors fails where the last rank's shard is padded
            shard = parameter.ds_tensor.ds_numel
            padded = nn.functional.pad(value.flatten(), (0, shard * self.world - value.numel()))
            safe_set_local_optimizer_state(parameter, padded[shard * self.rank :][:shard], key)

    def sum(self, tensor: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def from_rank_0(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def effective_settings(self) -> dict[str, Any]:
        return {"runtime": "deepspeed", "world_size": self.world, "deepspeed": self._settings}

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()
