"""Which TrainingArguments make a Trainer fit: each combination is a plan, replayed on the recorded step."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from memprof.integrations.fitting import Choice
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.precision.policy import Precision
from memprof.trace.step import Step

#: Checkpointing intervals to try, in layers; larger ones are left out.
_EVERY = (1, 2, 3, 4, 6, 8)


def possible_choices(model: Any, args: Any, step: Step) -> Iterator[Choice]:
    """Yields the candidate arguments: combinations of precision, activation checkpointing and accumulation.

    Args:
        model: The model that is trained.
        args: Its current TrainingArguments.
        step: The recorded step, whose modules the policies name.
    """
    ways = (_precisions(args), _splits(args), _checkpoints(model, args, step))
    for parts in itertools.product(*(((None, None), *way) for way in ways)):
        arguments: dict[str, Any] = {}
        policies: list[Policy] = []
        for own, policy in parts:
            if own is not None and policy is not None:
                arguments |= own
                policies.append(policy)
        if policies:
            yield Choice(arguments, tuple(policies))


def _precisions(args: Any) -> list[tuple[dict[str, Any], Policy]]:
    if args.bf16 or args.fp16:
        return []
    return [({"bf16": True}, Precision("bf16"))]


def _splits(args: Any) -> list[tuple[dict[str, Any], Policy]]:
    """Returns the accumulation candidates: numbers of parts that divide the batch."""
    batch, rounds = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return [
        (
            {"per_device_train_batch_size": batch // parts, "gradient_accumulation_steps": rounds * parts},
            Accumulate(parts),
        )
        for parts in range(2, batch + 1)
        if batch % parts == 0
    ]


def _checkpoints(model: Any, args: Any, step: Step) -> list[tuple[dict[str, Any], Policy]]:
    """Returns the checkpointing candidates, over the layers that the model itself would checkpoint."""
    layers = _layers(model, step)
    if not layers or _is_checkpointing(args):
        return []
    if not hasattr(args, "activation_checkpointing"):
        return [({"gradient_checkpointing": True}, Checkpoint(layers))]
    on: dict[str, Any] = {"activation_checkpointing": True}
    found: list[tuple[dict[str, Any], Policy]] = [(on, Checkpoint(layers))]
    if "every_n_layers" in inspect.signature(model.activation_checkpointing_enable).parameters:
        found += [
            ({**on, "activation_checkpointing_kwargs": {"every_n_layers": every}}, Checkpoint(layers[::every]))
            for every in _EVERY[1:]
            if every < len(layers)
        ]
    return found


def _is_checkpointing(args: Any) -> bool:
    return bool(getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False))


def _layers(model: Any, step: Step) -> tuple[str, ...]:
    """Returns the recorded step's names of the layers that the model checkpoints; none if they differ."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return ()
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:
        return ()  # older transformers, whose layers are not marked
    names = [name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    known = set(step.modules.name.tolist())
    for prefix in ("", f"{type(model).__name__}.", "module."):  # the last within DistributedDataParallel
        if all(prefix + name in known for name in names):
            return tuple(prefix + name for name in names)
    return ()
