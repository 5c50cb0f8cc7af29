"""Lower precision through torch.autocast and torch.amp.GradScaler, or weights of that type."""

from __future__ import annotations

from memprof.emit.code.pieces import Code
from memprof.policies.precision.policy import Precision

_FLOAT32 = '''
def _as_float32(value):
    """Casts a model's outputs to float32, including those in tuples, dicts and dataclasses."""

    def turn(leaf):
        if isinstance(leaf, torch.Tensor):
            return leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {each.name: getattr(leaf, each.name) for each in dataclasses.fields(leaf) if each.init}
            return dataclasses.replace(leaf, **{name: _as_float32(each) for name, each in fields.items()})
        return leaf

    return tree_map(turn, value)
'''

_AUTOCAST = '''
def _in_autocast(model, dtype):
    """Returns the model's forward under autocast; weights, gradients and what it returns stay in float32."""
    forward, device = model.forward, next(model.parameters()).device.type

    @functools.wraps(forward)
    def run(*args, **kwargs):
        with torch.autocast(device, dtype=dtype):
            outputs = forward(*args, **kwargs)
        return _as_float32(outputs)

    return run
'''

_PURE = '''
def _in_bfloat16(model, optimizer):
    """Casts weights, buffers and optimizer state to bfloat16; returns a forward that takes and returns float32."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype == torch.float32:
            tensor.data = tensor.data.to(torch.bfloat16)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(torch.bfloat16)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            # Adam's step count stays: bfloat16 cannot count beyond 256.
            if torch.is_tensor(value) and value.dtype == torch.float32 and value.shape == parameter.shape:
                state[key] = value.to(torch.bfloat16)
    forward = model.forward

    def shorten(leaf):
        is_long = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
        return leaf.to(torch.bfloat16) if is_long else leaf

    @functools.wraps(forward)
    def run(*args, **kwargs):
        args, kwargs = tree_map(shorten, (args, kwargs))
        return _as_float32(forward(*args, **kwargs))

    return run
'''

_IMPORTS = (
    "import dataclasses",
    "import functools",
    "import torch",
    "from torch.utils._pytree import tree_map",
)

SCALED = (
    "precision fp16: scale the loss in your loop with torch's GradScaler, as shown at the top; memprof itself would "
    "scale inside the model. Clip gradients after scaler.unscale_(optimizer)."
)


def precision_code(policy: Precision) -> Code:
    """Returns the code of a precision policy; fp16 also needs a GradScaler in the loop."""
    if policy.is_pure:
        return Code(
            imports=_IMPORTS,
            helpers=(_FLOAT32, _PURE),
            calls=("model.forward = _in_bfloat16(model, optimizer)",),
            needs_optimizer=True,
            notes=("precision pure-bf16: updates smaller than 1/256 of a weight are rounded away.",),
        )
    dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[policy.dtype]
    return Code(
        imports=_IMPORTS,
        helpers=(_FLOAT32, _AUTOCAST),
        calls=(f"model.forward = _in_autocast(model, {dtype})",),
        notes=(SCALED,) if policy.dtype == "fp16" else (),
    )
