"""What of a user's DeepSpeed JSON DeepSpeed 0.19 would ignore, or use to change what is learnt.

Read from its sources: a key that it does not know, or that the chosen stage never looks at, is
passed over without a word. Here it is an error.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mimkit.errors import UserError
from mimkit.registry import nearest

_STAGES: dict[str, tuple[int, ...]] = {  # keys of zero_optimization, and the stages that read them
    "stage": (0, 1, 2, 3),
    **dict.fromkeys(("contiguous_gradients", "reduce_bucket_size", "reduce_scatter", "overlap_comm",
                     "offload_optimizer"), (1, 2, 3)),
    **dict.fromkeys(("use_multi_rank_bucket_allreduce", "allgather_bucket_size",
                     "round_robin_gradients", "parameter_alignment", "compute_grad_norm"), (1, 2)),
    "ignore_unused_parameters": (2,),
    **dict.fromkeys(("offload_param", "sub_group_size", "zero_hpz_partition_size",
                     "memory_efficient_linear", "override_module_apply", "log_trace_cache_warnings",
                     "enable_sanity_checks", "leaf_module", "prefetch_bucket_size",
                     "param_persistence_threshold", "model_persistence_threshold",
                     "max_live_parameters", "max_reuse_distance", "module_granularity_threshold",
                     "use_all_reduce_for_fetch_params", "allgather_sequential"), (3,)),
}  # fmt: skip
_NEVER = {  # of zero_optimization: why it has no effect, or must have none
    "allgather_partitions": "DeepSpeed no longer reads it",
    "legacy_stage1": "DeepSpeed no longer has it",
    "elastic_checkpoint": "mimkit writes its own checkpoints, which fit any number of ranks",
    "load_from_fp32_weights": "mimkit writes its own checkpoints, in fp32",
    "pipeline_loading_checkpoint": "mimkit reads its own checkpoints",
    "gather_16bit_weights_on_model_save": "mimkit writes its own checkpoints, whole and in fp32",
    "stage3_gather_fp16_weights_on_model_save": "mimkit writes its own checkpoints",
    "cpu_offload": "it is deprecated; use offload_optimizer",
    "cpu_offload_param": "it is deprecated; use offload_param",
    "cpu_offload_use_pin_memory": "it is deprecated; use pin_memory in offload_optimizer",
    "save_muon_momentum_buffer_in_memory": "the optimizer is AdamW",
    "zenflow": "it updates with gradients of earlier steps, which changes what is learnt",
    "zero_quantized_weights": "it rounds weights, which changes what is learnt",
    "zero_quantized_nontrainable_weights": "it rounds weights, which changes what is learnt",
    "zero_quantized_gradients": "it rounds gradients, which changes what is learnt",
}
KEYS = _STAGES.keys() | _NEVER.keys()  # of zero_optimization, all that 0.19 has
USELESS = {  # top level
    "disable_allgather": "DeepSpeed no longer reads it",
    "compile": "DeepSpeed reads it in engine.compile(), which mimkit does not call",
    "zero_allow_untested_optimizer": "the optimizer is torch's AdamW, a tested one",
}
PRINTING = ("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
            "comms_logger", "flops_profiler", "timers")  # fmt: skip
_NESTED: dict[str, dict[str, type]] = {  # sections in which DeepSpeed takes any key and reads these
    "flops_profiler": {"enabled": bool, "recompute_fwd_factor": float, "profile_step": int,
                       "module_depth": int, "top_modules": int, "detailed": bool,
                       "output_file": str},
    "comms_logger": {"enabled": bool, "prof_all": bool, "prof_ops": list, "verbose": bool,
                     "debug": bool},
    "timers": {"throughput": dict},
    "timers.throughput": {"enabled": bool, "synchronized": bool},
    "aio": {"block_size": int, "queue_depth": int, "intra_op_parallelism": int,
            "single_submit": bool, "overlap_events": bool, "use_gds": bool},
    "torch_autocast": {"enabled": bool, "dtype": str},
}  # fmt: skip
TYPES: dict[str, type] = {  # of all that is handed on without a check of DeepSpeed's own
    "zero_optimization": dict, "zero_force_ds_cpu_optimizer": bool, "steps_per_print": int,
    "wall_clock_breakdown": bool, "memory_breakdown": bool, "dump_state": bool,
    "prescale_gradients": bool, "gradient_predivide_factor": float, "disable_python_gc": bool,
    **{section: dict for section in _NESTED},
    **{f"{section}.{key}": kind for section, keys in _NESTED.items()
       if section != "torch_autocast" for key, kind in keys.items()},  # ours: compared with these
}  # fmt: skip
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string",
          list: "a list", dict: "an object {...}"}  # fmt: skip
_NVME = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read",
         "pipeline_write", "fast_init")  # fmt: skip


def read_json(file: Path) -> dict[str, Any]:
    """The user's JSON; UserError where it is none, or gives a key twice (one would be ignored)."""
    try:
        user = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_pairs)
    except (OSError, ValueError) as error:
        raise UserError(f"engine.deepspeed_config: cannot read {file}: {error}") from error
    if not isinstance(user, dict):
        raise UserError(f"engine.deepspeed_config: {file} holds no JSON object")
    return user


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"given twice: {', '.join(twice)}")
    return dict(pairs)


def check_effect(user: Mapping[str, Any], *, stage: int, on_cpu: bool, file: Path) -> None:
    """UserError for the first setting in `user` that would have no effect at this ZeRO stage, on
    this kind of device, or one on what is learnt."""
    for problem in _problems(user, stage=stage, on_cpu=on_cpu):
        raise UserError(f"{file} has {problem}; leave it out")


def _problems(user: Mapping[str, Any], *, stage: int, on_cpu: bool) -> Iterator[str]:
    for key, value in _leaves(user):
        if value == "auto":
            yield f"{key} = 'auto', which only HuggingFace's Trainer fills in: DeepSpeed drops it"
    yield from _of_another_kind(user)
    for key, why in USELESS.items():
        if key in user:
            yield f"'{key}', which does nothing: {why}"
    for section, known in _NESTED.items():
        for key in _section(user, section):
            if key not in known:
                near = nearest(key, list(known))
                yield (f"{section}.{key}, which DeepSpeed would ignore.{near} It reads there: "
                       f"{', '.join(known)}")  # fmt: skip
    if user.get("communication_data_type") not in (None, "fp32"):
        yield (f"communication_data_type = {user['communication_data_type']!r}, which rounds "
               "gradients: that changes what is learnt, and engine settings never do")  # fmt: skip
    zero = _section(user, "zero_optimization")
    yield from _zero_problems(zero, stage=stage)
    yield from _offload_problems(user, zero, on_cpu=on_cpu)


def _of_another_kind(user: Mapping[str, Any]) -> Iterator[str]:
    for key, kind in TYPES.items():
        section, _, last = key.rpartition(".")
        within = _section(user, section) if section else user
        value = within.get(last)
        exactly = type(value) is kind or (kind is float and type(value) is int)
        if last in within and value is not None and not exactly:
            yield f"{key} = {value!r}, expected {_KINDS[kind]}; write that, or"


def _zero_problems(zero: Mapping[str, Any], *, stage: int) -> Iterator[str]:
    for key, value in zero.items():
        stages = _STAGES.get(key.removeprefix("stage3_"))
        if key in _NEVER or key.removeprefix("stage3_") in _NEVER:
            why = _NEVER.get(key) or _NEVER[key.removeprefix("stage3_")]
            yield f"zero_optimization.{key} = {value!r}, which mimkit does not take: {why}"
        elif stages is not None and stage not in stages:
            yield (f"zero_optimization.{key} = {value!r}, which DeepSpeed would ignore at "
                   f"engine.zero_stage={stage}: it is read at stage "
                   f"{' and '.join(map(str, stages))}")  # fmt: skip
    if zero.get("compute_grad_norm") is False:
        yield ("zero_optimization.compute_grad_norm = False, but mimkit clips by the gradient's "
               "norm and watches it")  # fmt: skip


def _offload_problems(
    user: Mapping[str, Any], zero: Mapping[str, Any], *, on_cpu: bool
) -> Iterator[str]:
    used = {name: zero[name] for name in ("offload_optimizer", "offload_param")
            if isinstance(zero.get(name), dict)
            and zero[name].get("device", "none") != "none"}  # fmt: skip
    nvme = [name for name, settings in used.items() if settings.get("device") == "nvme"]
    for name, settings in used.items():
        if on_cpu:
            yield (f"zero_optimization.{name}.device = {settings['device']!r}, but this machine "
                   "trains on the CPU: there is nothing to move away from")  # fmt: skip
        for key in settings:
            if key in _NVME and name not in nvme:
                yield (f"zero_optimization.{name}.{key}, which DeepSpeed reads with device 'nvme' "
                       f"only, and device is {settings['device']!r}")  # fmt: skip
        if settings.get("super_offload"):
            yield f"zero_optimization.{name}.super_offload, which brings an optimizer of its own"
    if "offload_optimizer" in used and user.get("zero_force_ds_cpu_optimizer", True):
        yield (
            "zero_optimization.offload_optimizer, with which DeepSpeed wants an optimizer of its "
            'own: add "zero_force_ds_cpu_optimizer": false at the top level to keep AdamW, or'
        )
    if "zero_force_ds_cpu_optimizer" in user and "offload_optimizer" not in used:
        yield "'zero_force_ds_cpu_optimizer', which does nothing without offload_optimizer"
    if "aio" in user and not nvme:
        yield "'aio', which does nothing where nothing is offloaded to device 'nvme'"


def check_used(given: Mapping[str, Any], used: Mapping[str, Any], *, version: str) -> None:
    """UserError where DeepSpeed says that it runs with something else than it was given."""
    said = dict(_leaves(used))
    for key, value in _leaves(given):
        mine = key.replace("zero_optimization.stage3_", "zero_optimization.")
        if mine in said and said[mine] != value:
            raise UserError(
                f"DeepSpeed {version} runs with {key}={said[mine]!r}, although it was given "
                f"{value!r}; mimkit was made with 0.19.8: leave the setting out or install that"
            )


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """`timers.throughput` of the settings, empty where there is none."""
    found: Any = settings
    for word in name.split("."):
        found = found.get(word) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
