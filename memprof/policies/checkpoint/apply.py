"""Applies activation checkpointing: chosen forwards drop their saved tensors and are recomputed in backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from memprof.errors import PolicyError
from memprof.policies.checkpoint.kinds import RANDOM_REFUSAL, KeptOperators, changes_in_place, kept_operators
from memprof.policies.checkpoint.policy import longest_sequence, split
from memprof.policies.checkpoint.second_forward import Arguments, operator_named, selective_contexts
from memprof.policies.plan.patterns import match_modules, outermost
from memprof.policies.runtime.job import Effect, Job
from memprof.policies.runtime.job_traits import import_compiler
from memprof.policies.runtime.replaced import is_in_transform
from memprof.trace.operator_facts import ATTENTION, OPERATOR_KINDS

if TYPE_CHECKING:
    from memprof.policies.checkpoint.policy import Checkpoint


def apply(job: Job, policy: Checkpoint) -> None:
    """Wraps the forwards of the chosen modules, or of the segments of one nn.Sequential.

    Raises:
        PolicyError: No module fits; nothing has been changed.
    """
    modules = job.modules_named()
    keep = kept_operators(policy.keep)
    _refuse_operators(policy)
    import_compiler()
    effect = job.expect(
        policy.describe(), "nothing was recomputed, as autograd saved nothing there, or gave it to hooks of the job"
    )
    if policy.segments:
        name = _sequence(modules, policy)
        chosen = modules[name]
        job.wrap_forward(chosen, lambda _: _segmented(job.model, chosen, name, policy.segments, keep, effect))
        return
    matching = match_modules(policy.modules, modules)
    called = [name for name in matching if type(modules[name]).forward is not torch.nn.Module.forward]
    if not called:
        name, kind = matching[0], type(modules[matching[0]]).__name__
        raise PolicyError(f"{name} is a {kind}, which is never called; choose its submodules: '{name}.*'.")
    in_place = [name for name in called if _changes_its_input(modules[name])]
    names = [name for name in called if name not in in_place]
    if not names:
        raise PolicyError(
            f"{_list(in_place)} changes its input in place and cannot run again; choose the module around it."
        )
    if in_place:
        job.notes.append(f"checkpoint: skipped {_list(in_place)}, which changes its input in place.")
    if keep and len(outermost(names)) < len(names):
        # The inner region would drop and recompute tensors that the outer one keeps.
        names = outermost(names)
        job.notes.append(f"checkpoint: with keep, only the outermost modules are regions: {_list(names)}.")
    for name in names:
        _wrap(job, name, modules[name], keep, effect)


def _refuse_operators(policy: Checkpoint) -> None:
    """Rejects keeping outputs of operators that are unknown to torch, random or in-place."""
    for kind in policy.keep:
        name = kind.partition("#")[0]
        if name in OPERATOR_KINDS:
            continue
        operator = operator_named(name)
        if operator is None:
            raise PolicyError(f"torch has no operator {name}; write a name with its overload, such as aten.mm.default.")
        if operator._schema.is_mutable:
            raise PolicyError(f"{name} changes its input in place, so its output cannot be kept; leave it out of keep.")
        if torch.Tag.nondeterministic_seeded in operator.tags and name not in ATTENTION:
            raise PolicyError(RANDOM_REFUSAL.format(name=name))


def _wrap(job: Job, name: str, module: torch.nn.Module, keep: KeptOperators, effect: Effect) -> None:
    job.wrap_forward(module, lambda forward: _region(job.model, name, [module], forward, keep, effect))


def _list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _changes_its_input(module: torch.nn.Module) -> bool:
    """Returns whether a module is an in-place activation of torch: its input is overwritten before recompute."""
    return bool(getattr(module, "inplace", False)) and not any(True for _ in module.children())


def _sequence(modules: dict[str, torch.nn.Module], policy: Checkpoint) -> str:
    """Returns the name of the nn.Sequential to divide.

    Raises:
        PolicyError: There is none, or it cannot be divided.
    """
    if policy.modules:
        names = match_modules(policy.modules, modules)
        if len(names) > 1:
            raise PolicyError(f"segments requires a single nn.Sequential; {_list(names)} are {len(names)} modules.")
    else:
        children = [
            (name, len(list(module.children())))
            for name, module in modules.items()
            if type(module).__name__ == "Sequential"
        ]
        names = [longest_sequence(children)]
    chosen = modules[names[0]]
    if type(chosen).forward is not torch.nn.Sequential.forward:
        raise PolicyError(f"segments requires an nn.Sequential; {names[0]} is a {type(chosen).__name__}.")
    count = len(list(chosen.children()))
    if count < policy.segments:
        raise PolicyError(f"{names[0]} has {count} modules, fewer than {policy.segments} segments.")
    return names[0]


def _segmented(
    root: torch.nn.Module, sequence: torch.nn.Module, name: str, segments: int, keep: KeptOperators, effect: Effect
) -> Callable[..., Any]:
    """Returns a forward of an nn.Sequential that runs it in regions of consecutive modules."""
    children = list(sequence)  # type: ignore[call-overload]  # nn.Sequential iterates over its modules
    parts = [children[first:last] for first, last in split(len(children), segments)]
    regions = [_region(root, name, part, partial(_in_turn, part), keep, effect) for part in parts]
    return partial(_in_turn, regions)


def _in_turn(forwards: Iterable[Callable[..., Any]], value: Any) -> Any:
    for forward in forwards:
        value = forward(value)
    return value


def _region(
    root: torch.nn.Module,
    name: str,
    modules: list[torch.nn.Module],
    forward: Callable[..., Any],
    keep: KeptOperators,
    effect: Effect,
) -> Callable[..., Any]:
    """Returns a forward that saves nothing and is recomputed in backward.

    Args:
        root: The model: in eval mode nothing changes, unless it is frozen, as loss networks are, which train others.
        name: The module's qualified name, for messages.
        modules: The modules the forward calls, for their buffers.
        forward: The current forward.
        keep: Operators whose outputs are kept.
        effect: Notes a recompute.
    """
    inside = [part for module in modules for part in module.modules()]
    statistics = [part for part in inside if isinstance(part, _NormBase) and part.track_running_stats]
    is_frozen = not any(parameter.requires_grad for parameter in root.parameters())
    was_assigned = deque([False, False], maxlen=2)
    # torch ends a recompute early by an exception, which TorchScript's interpreter turns into an error of the job.
    has_script = any(isinstance(part, torch.jit.ScriptModule) for part in inside)

    def kept() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return selective_contexts(keep) if keep else (nullcontext(), nullcontext())

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        before, again = kept()
        return before, _together(again, _frozen(statistics)) if statistics else again

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            effect.is_tried = True
        if not (torch.is_grad_enabled() and (root.training or is_frozen)):
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler traces the region once, and recomputes it in the code that it generates, which updates
            # running statistics once.
            settings: dict[str, Any] = {"context_fn": kept} if keep else {}
            return checkpoint(forward, *args, use_reentrant=False, **settings, **kwargs)
        if is_in_transform():
            return forward(*args, **kwargs)
        # Tensors are passed one by one, wherever they are in the arguments: torch saves these, and an outer region can
        # drop and recompute them; torch would keep tensors inside containers or keywords alive.
        leaves, structure = _pytree.tree_flatten((args, kwargs))
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [None if known else leaf for known, leaf in zip(is_tensor, leaves, strict=True)]
        # The first run gets the original containers, which it may change; the recompute gets new ones, and objects
        # whose contents are those from before.
        pending = [(args, kwargs)]
        objects = Arguments(others, inside)

        def run(*values: torch.Tensor) -> Any:
            if pending:
                own_args, own_kwargs = pending.pop()
                result = forward(*own_args, **own_kwargs)
                objects.compare()
                return result
            effect.is_done = True
            remaining = iter(values)
            all_leaves = [next(remaining) if known else leaf for known, leaf in zip(is_tensor, others, strict=True)]
            own_args, own_kwargs = _pytree.tree_unflatten(all_leaves, structure)
            with objects.as_before():
                return forward(*own_args, **own_kwargs)

        buffers = _plain_buffers(inside)
        watched = [tensor for tensor in (*tensors, *buffers) if not tensor.is_inference()]
        versions = [tensor._version for tensor in watched]
        with set_checkpoint_early_stop(False) if has_script else nullcontext():
            result = checkpoint(run, *tensors, use_reentrant=False, context_fn=contexts)
        # A running statistic is assigned in every call, and would be once more in backward; a cache when it is filled.
        after = _plain_buffers(inside)
        is_new = [one is not other and one.shape == other.shape for one, other in zip(buffers, after, strict=False)]
        was_assigned.append(any(is_new))
        if all(was_assigned) or versions != [tensor._version for tensor in watched]:
            raise PolicyError(changes_in_place(name))
        return result

    return call


def _plain_buffers(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Returns the buffers that nothing restores after a recompute."""
    return [
        buffer
        for module in modules
        if not isinstance(module, _NormBase)
        for buffer in module._buffers.values()
        if buffer is not None
    ]


@contextmanager
def _frozen(modules: list[_NormBase]) -> Iterator[None]:
    """Keeps running statistics as they are while a forward runs again.

    BatchNorm's kernel computes (1 - momentum) x old + momentum x new: with momentum 0 it writes the old value, and
    without num_batches_tracked it counts nothing. InstanceNorm averages over copies, which would round: it writes
    into copies. Either way the forward saves as many tensors as before, as torch checks.
    """
    before = [(module, module.momentum, dict(module._buffers)) for module in modules]
    try:
        for module in modules:
            if isinstance(module, _BatchNorm):
                module.momentum = 0.0
                module._buffers["num_batches_tracked"] = None
            else:
                module._buffers.update(
                    {name: buffer.clone() for name, buffer in module._buffers.items() if buffer is not None}
                )
        yield
    finally:
        for module, momentum, buffers in before:
            module.momentum = momentum
            module._buffers.update(buffers)


@contextmanager
def _together(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
