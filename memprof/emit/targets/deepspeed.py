"""DeepSpeed's JSON: ZeRO stage, offload, data types, accumulation, and activation checkpointing settings.

Keys and values: DeepSpeed's configuration, https://www.deepspeed.ai/docs/config-json/, as of 0.19.8.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from memprof.emit.code.short_pieces import options_text
from memprof.emit.emission import Emitted, Request, Target
from memprof.emit.targets.shared import Sorted
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.allocator.policy import VARIABLE, Allocator
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.precision.policy import Precision
from memprof.policies.shard.policy import Shard
from memprof.policies.swap.policy import Swap

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_ZERO = "zero_optimization"
_IN_CODE = "JSON cannot express it; memprof emit --to pytorch writes code for it."


class DeepSpeed(Target):
    """DeepSpeed's configuration file."""

    name: ClassVar[str] = "deepspeed"
    title: ClassVar[str] = "DeepSpeed"

    def emit(self, request: Request) -> Emitted:
        """Emits the configuration; JSON has no comments, so all remarks are returned separately."""
        found = Sorted()
        policies = request.plan.policies
        stage = max((each.stage for each in policies if isinstance(each, Shard) and each.world_size > 1), default=0)
        needed = max((_stage_needed(each) for each in policies), default=0)
        if needed > stage:
            found.notes.append(
                f"zero_optimization: stage {needed} instead of {stage or 'none'}, because the rest of the plan needs "
                "it; on one rank it shards nothing."
            )
        for policy in policies:
            _sort(found, policy, max(stage, needed), policies)
        if not found.expressed:
            return Emitted("", tuple(found.cannot), tuple(found.notes))
        config = {**_batch(found, request), **found.arguments}
        return Emitted(json.dumps(config, indent=2) + "\n", tuple(found.cannot), tuple(found.notes), found.expressed)


def _batch(found: Sorted, request: Request) -> dict[str, Any]:
    """Returns the batch keys, which DeepSpeed requires."""
    if request.batch:
        size: int | str = request.batch_of_a_part
    else:
        size = "auto"
        found.notes.append(
            'train_micro_batch_size_per_gpu: "auto" is filled in by transformers and accelerate; for '
            "deepspeed.initialize, write a number or pass --batch N to memprof emit."
        )
    return {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": request.parts}


def _stage_needed(policy: Policy) -> int:
    """Returns the lowest ZeRO stage that supports a policy."""
    if isinstance(policy, Swap):
        return {"optimizer": 1, "parameters": 3}.get(policy.what, 0)
    if isinstance(policy, OptimizerPolicy):
        return 1 if policy.state == "host" else 0
    return 1 if isinstance(policy, Precision) and policy.is_pure else 0


def _sort(found: Sorted, policy: Policy, stage: int, policies: tuple[Policy, ...]) -> None:
    match policy:
        case Shard():
            _add_zero(found, stage)
            split = "; each rank reads its own batches" if policy.batch == "keep" else ""
            start = f"shard: start with deepspeed --num_gpus {policy.world_size} or torchrun{split}."
            units = " ZeRO gathers single modules, not the plan's units." if policy.stage >= 2 else ""
            found.take({}, start + units)
        case Precision():
            _sort_precision(found, policy, stage)
        case Accumulate():
            found.take({}, "accumulate: call engine.backward() and engine.step() for each part of the batch.")
        case Checkpoint():
            _sort_checkpoint(found, policy, policies)
        case Swap():
            _sort_swap(found, policy, stage, policies)
        case OptimizerPolicy():
            _sort_optimizer(found, policy, stage)
        case Allocator():
            found.leave(policy, f"not a key of the JSON: start the job with {VARIABLE}={options_text(policy)}.")
        case _:
            found.leave(policy, _IN_CODE)


def _add_zero(found: Sorted, stage: int, **keys: Any) -> None:
    zero = found.arguments.setdefault(_ZERO, {"stage": stage})
    zero.update(keys)


def _sort_precision(found: Sorted, policy: Precision, stage: int) -> None:
    if policy.is_pure:
        _add_zero(found, stage)
        short = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        found.take({"bf16": short})
        return
    found.take(
        {"torch_autocast": {"enabled": True, "dtype": _DTYPES[policy.dtype]}},
        f"precision: torch_autocast does what the plan does; DeepSpeed's own {policy.dtype} section would keep "
        "16-bit weights in addition to the float32 ones.",
    )


def _sort_checkpoint(found: Sorted, policy: Checkpoint, policies: tuple[Policy, ...]) -> None:
    """Configures deepspeed.checkpointing; the model has to call it."""
    moves = any(
        isinstance(each, Swap)
        and each.what == "activations"
        and each.to == "host"
        and each.modules in ((".",), policy.modules)
        for each in policies
    )
    reason = "the JSON cannot select modules: call deepspeed.checkpointing.checkpoint on them in your model."
    if policy.keep:
        reason += f" It cannot keep outputs of {', '.join(policy.keep)}."
    found.leave(policy, reason)
    # The first of several policies applies to all.
    section = {"partition_activations": False, "cpu_checkpointing": moves, "contiguous_memory_optimization": False}
    found.arguments.setdefault("activation_checkpointing", section)
    found.arguments["activation_checkpointing"]["cpu_checkpointing"] |= moves
    found.take({})


def _sort_swap(found: Sorted, policy: Swap, stage: int, policies: tuple[Policy, ...]) -> None:
    device: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    if policy.to == "disk":
        device = {"device": "nvme", "nvme_path": policy.folder or "/tmp"}
    if policy.what == "optimizer":
        _add_zero(found, stage, offload_optimizer=device)
        whole = "" if policy.is_whole else " It moves the state of all parameters, not only of the plan's modules."
        found.take({}, f"{policy.describe()}: DeepSpeed also runs the update on the CPU.{whole}")
    elif policy.what == "parameters":
        _add_zero(found, stage, offload_param=device)
        found.take({}, f"{policy.describe()}: moves all parameters, not only those of the plan's modules.")
    elif found.arguments.get("activation_checkpointing", {}).get("cpu_checkpointing") and policy.to == "host":
        found.take({}, f"{policy.describe()}: cpu_checkpointing moves the inputs of checkpointed layers.")
    else:
        found.leave(policy, _IN_CODE)


def _sort_optimizer(found: Sorted, policy: OptimizerPolicy, stage: int) -> None:
    if policy.state == "host":
        _add_zero(found, stage, offload_optimizer={"device": "cpu", "pin_memory": True})
        found.take({}, "optimizer host: DeepSpeed also runs the update on the CPU.")
    rest = [policy.loop, "8bit" if policy.state == "8bit" else "", "in-backward" if policy.in_backward else ""]
    missing = ", ".join(word for word in rest if word)
    if missing:
        found.leave(policy, f"no key for {missing}; DeepSpeed's optimizers have their own update loops.")
