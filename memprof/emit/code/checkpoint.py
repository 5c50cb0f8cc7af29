"""Activation checkpointing through torch.utils.checkpoint."""

from __future__ import annotations

from memprof.emit.code.pieces import MODULES, MODULES_IMPORTS, Code, call, expressions, list_of
from memprof.policies.checkpoint.kinds import kept_operators
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.trace.operator_facts import OPERATOR_KINDS

_RECOMPUTE = '''
def _recompute(model, modules, forward{keep}):
    """Returns a forward of modules that saves only its inputs, and runs again in backward."""
    parts = [part for module in modules for part in module.modules()]
    norms = [part for part in parts if isinstance(part, _NORMS) and part.track_running_stats]

    def contexts():
        first, again = {selective}
        return first, _again(norms, again)

    @functools.wraps(forward)
    def run(*args, **kwargs):
        if not (torch.is_grad_enabled() and model.training):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run
'''

_NORMS = """
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORMS = (*_BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""

_AGAIN = '''
@contextlib.contextmanager
def _again(norms, context):
    """Keeps running statistics unchanged while a forward runs again in a context: they are updated once a step."""
    before = [(norm, norm.momentum, dict(norm.named_buffers(recurse=False))) for norm in norms]
    try:
        for norm, _, buffers in before:
            if isinstance(norm, _BATCH_NORMS):
                norm.momentum = 0.0
                norm.num_batches_tracked = None
            else:  # these average over copies, which would round
                for name, value in buffers.items():
                    setattr(norm, name, value.clone())
        with context:
            yield
    finally:
        for norm, momentum, buffers in before:
            norm.momentum = momentum
            for name, value in buffers.items():
                setattr(norm, name, value)
'''

_REGIONS = '''
def _regions(model, patterns{outermost_argument}):
    """Returns the modules to run again: those that are called, except in-place activations."""
    found = {{
        name: module
        for name, module in _modules(model, patterns).items()
        if type(module).forward is not nn.Module.forward
        and not (getattr(module, "inplace", False) and not list(module.children()))
    }}
    if not found:
        raise ValueError(f"No module that {{patterns}} match can run again: choose the modules around it.")
{outermost}    return found.values()
'''

_OUTERMOST = """    # An inner region would drop what the outer one keeps, and run it again.
    if is_selective:
        found = {
            name: module
            for name, module in found.items()
            if not any(name != other and (not other or name.startswith(f"{other}.")) for other in found)
        }
"""

_SELECTIVE = '''
def _keeping(keep):
    """Returns the contexts of both runs, in which the outputs of some operators are kept."""

    def decide(_, operator, *args, **kwargs):
        is_kept = str(operator) in keep and not _drops_out(operator, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)
'''

_SELECTIVE_CALLS = '''
def _keeping(keep):
    """Returns the contexts of both runs, in which the outputs of some operators are kept: of all calls, or of some."""
    calls = collections.Counter()

    def decide(context, operator, *args, **kwargs):
        name = str(operator)
        calls[context.is_recompute, name] += 1
        kept = keep.get(name, ())
        is_kept = kept is None or calls[context.is_recompute, name] in kept
        is_kept = is_kept and not _drops_out(operator, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)
'''

_DROPS_OUT = '''
def _drops_out(operator, args, kwargs):
    """Returns whether attention applies dropout, which must run again for later random numbers to stay the same."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value))
    return False
'''

_SEGMENTS = '''
def _run_in_segments(model, sequence, count{keep}):
    """Makes an nn.Sequential run in regions of consecutive modules, the longer ones first."""
    children = list(sequence)
    size, longer = divmod(len(children), count)
    edges = [number * size + min(number, longer) for number in range(count + 1)]
    regions = []
    for first, last in pairwise(edges):
        part = children[first:last]

        def run(value, part=part):
            for module in part:
                value = module(value)
            return value

        regions.append(_recompute(model, part, run{keep_passed}))

    def forward(value):
        for region in regions:
            value = region(value)
        return value

    sequence.forward = forward
'''

_IMPORTS = (
    "import contextlib",
    "import functools",
    "import torch",
    "from torch import nn",
    "from torch.utils.checkpoint import checkpoint",
)
_SELECTIVE_IMPORTS = ("from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts",)


def checkpoint_code(policy: Checkpoint, *, has_keep: bool, has_calls: bool = False) -> Code:
    """Returns the code of a checkpoint policy.

    Args:
        policy: The policy.
        has_keep: Whether any checkpoint of the plan keeps the outputs of some operators.
        has_calls: Whether one of them keeps those of some calls only.
    """
    helpers = [_NORMS, _AGAIN]
    imports = [*_IMPORTS, *MODULES_IMPORTS]
    if has_keep:
        helpers += [_SELECTIVE_CALLS if has_calls else _SELECTIVE, _DROPS_OUT]
        imports += [*_SELECTIVE_IMPORTS, *(("import collections",) if has_calls else ())]
    selective = "_keeping(keep) if keep else (contextlib.nullcontext(), contextlib.nullcontext())"
    plainly = "contextlib.nullcontext(), contextlib.nullcontext()"
    argument = f", keep={'{}' if has_calls else 'frozenset()'}" if has_keep else ""
    helpers.append(_RECOMPUTE.format(keep=argument, selective=selective if has_keep else plainly))
    keep = (f"keep={_calls_of(policy) if has_calls else _set_of(policy)}",) if policy.keep else ()
    if policy.segments:
        imports.append("from itertools import pairwise")
        helpers.append(_SEGMENTS.format(keep=argument, keep_passed=", keep" if has_keep else ""))
        if policy.modules:
            helpers.append(MODULES)
            chosen = f"(sequence,) = _modules(model, {list_of(expressions(policy.modules))}).values()"
        else:
            chosen = (
                "# The longest nn.Sequential of the model.\n"
                "sequence = max((each for each in model.modules() if type(each) is nn.Sequential), key=len)"
            )
        run = call("_run_in_segments", "model", "sequence", str(policy.segments), *keep)
        return Code(imports=tuple(imports), helpers=tuple(helpers), calls=(chosen, run))
    helpers += [
        MODULES,
        _REGIONS.format(
            outermost_argument=", is_selective=False" if has_keep else "", outermost=_OUTERMOST if has_keep else ""
        ),
    ]
    found = ("model", list_of(expressions(policy.modules)), *(("is_selective=True",) if policy.keep else ()))
    recomputed = call("module.forward = _recompute", "model", "[module]", "module.forward", *keep)
    indented = recomputed.replace("\n", "\n    ")
    loop = f"for module in {call('_regions', *found)}:\n    {indented}"
    return Code(imports=tuple(imports), helpers=tuple(helpers), calls=(loop,))


def _set_of(policy: Checkpoint) -> str:
    """Formats the kept operators as a set, kinds in the order of the policy."""
    names = [name for kind in policy.keep for name in OPERATOR_KINDS.get(kind, (kind,))]
    assert set(names) == kept_operators(policy.keep).always
    inner = "\n".join(f'    "{name}",' for name in dict.fromkeys(names))
    return f"{{\n{inner}\n}}"


def _calls_of(policy: Checkpoint) -> str:
    """Formats the kept operators as a dictionary of the numbers of their calls, None for all of them."""
    kept = kept_operators(policy.keep)
    lines = [f'    "{name}": None,' for name in sorted(kept.always)]
    for name, numbers in sorted(kept.calls.items()):
        lines.append(f'    "{name}": {{{", ".join(map(str, sorted(numbers)))}}},')
    return "\n".join(("{", *lines, "}"))
