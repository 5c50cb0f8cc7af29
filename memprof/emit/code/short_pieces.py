"""Code of the policies that need few lines: allocator options, compilation, updates, precision, sharding."""

from __future__ import annotations

from memprof.emit.code.pieces import MODULES, MODULES_IMPORTS, Code, call, expressions, list_of, text_of
from memprof.policies.allocator.policy import OLD_VARIABLE, VARIABLE, Allocator
from memprof.policies.compile.policy import FUSION, Compile
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.precision.policy import Precision
from memprof.policies.shard.policy import Shard

_UNDER_BUDGET = '''
def _compiler(budget, options):
    """Returns torch's compiler under an activation memory budget: a share of what it would save for backward."""

    def compile_under_budget(graph, inputs):
        with functorch_config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs, config_patches=options)

    return compile_under_budget
'''
_OUTERMOST = '''
def _outermost(modules):
    """Leaves out modules that lie inside another of them."""
    return {
        name: module
        for name, module in modules.items()
        if not any(name != other and (not other or name.startswith(f"{other}.")) for other in modules)
    }
'''
_LOOP = '''
def _set_loop(optimizer, foreach, fused):
    """Chooses the form of the update; before the first step, and before a state is loaded."""
    for group in (*optimizer.param_groups, optimizer.defaults):
        if ("fused" if fused else "foreach") not in group:
            raise ValueError(f"{type(optimizer).__name__} has no such form of its update.")
        group.update({key: value for key, value in (("foreach", foreach), ("fused", fused)) if key in group})
    if fused:
        optimizer._need_device_dtype_check_for_fused = True  # as its constructor sets it
'''
_FORMS = {"loop": (False, False), "foreach": (True, False), "fused": (False, True)}
_IN_BACKWARD = '''
def _step_in_backward(optimizer):
    """Updates each parameter as soon as backward has completed its gradient, and frees the gradient."""
    step = type(optimizer).step.__wrapped__  # without the hooks, which are for a step as a whole
    lock = threading.RLock()  # backward runs a thread for each device

    def hook_of(group):
        def update(parameter):
            with lock:
                groups, parameters = optimizer.param_groups, group["params"]
                group["params"], optimizer.param_groups = [parameter], [group]
                try:
                    step(optimizer)
                finally:
                    group["params"], optimizer.param_groups = parameters, groups
            parameter.grad = None

        return update

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hook_of(group))
'''
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
_LAYERS = '''
def _layers(model):
    """Returns the layers: the outermost modules numbered in a list or a sequence, except single operations."""
    modules, found = dict(model.named_modules()), {}
    for name, module in modules.items():
        above, _, last = name.rpartition(".")
        is_layer = last.isdigit() and not isinstance(module, nn.ModuleList)
        is_layer = is_layer and (bool(list(module.children())) or isinstance(modules[above], nn.ModuleList))
        if is_layer and not any(name.startswith(f"{other}.") for other in found):
            found[name] = module
    return found
'''


def options_text(policy: Allocator) -> str:
    """Returns the options in torch's syntax: ``expandable_segments:True,max_split_size_mb:128``."""
    return ",".join(f"{key}:{value}" for key, value in policy.options().items())


def allocator_code(policy: Allocator) -> Code:
    """Returns the code of an allocator policy, which runs when the generated module is imported."""
    return Code(
        imports=("import os",),
        helpers=(
            (
                "# Torch reads this when the first CUDA tensor is created, under its old name if that is set.\n"
                f'_NAME = "{OLD_VARIABLE}" if "{OLD_VARIABLE}" in os.environ else "{VARIABLE}"\n'
                f"_OPTIONS = (os.environ.get(_NAME), {text_of(options_text(policy))})\n"
                'os.environ[_NAME] = ",".join(each for each in _OPTIONS if each)'
            ),
        ),
        notes=(
            (
                "allocator: torch reads its options when the first CUDA tensor is created, so import this file before "
                "that; or "
                f"start the job with {VARIABLE}={options_text(policy)}."
            ),
        ),
    )


def compile_code(policy: Compile) -> Code:
    """Returns the code of a compile policy."""
    imports = ["import torch", *MODULES_IMPORTS]
    helpers = [MODULES, _OUTERMOST]
    backend = ""
    options = {FUSION: policy.fusion_gb} if policy.fusion_gb >= 0 else {}
    if not policy.is_plain:
        imports += [
            "import torch._functorch.config as functorch_config",
            "from torch._inductor.compile_fx import compile_fx",
        ]
        helpers.append(_UNDER_BUDGET)
        backend = f", backend=_compiler({policy.activation_budget!r}, {options!r})"
    calls = []
    is_whole = policy.modules in (("",), (".",))
    if is_whole and options:
        imports.append("import torch._inductor.config as inductor_config")
        calls.append(f"inductor_config.{FUSION} = {policy.fusion_gb!r}")
    if policy.activation_budget < 1 and is_whole:
        # Also for what the job compiles itself, inside of which the region below is inlined.
        calls.append(f"functorch_config.activation_memory_budget = {policy.activation_budget!r}")
    found = call("_modules", "model", list_of(expressions(policy.modules)))
    return Code(
        imports=tuple(imports),
        helpers=tuple(helpers),
        calls=(
            *calls,
            f"for module in _outermost({found}).values():\n    module.forward = torch.compile(module.forward{backend})",
        ),
        notes=("compile: torch limits fusion by the peak from 2.15 on; an older one refuses the option.",)
        if options
        else (),
    )


def optimizer_code(policy: OptimizerPolicy) -> Code:
    """Returns the code of an optimizer policy that leaves the state unchanged."""
    imports, helpers, calls, notes = [], [], [], []
    if policy.loop:
        foreach, fused = _FORMS[policy.loop]
        helpers.append(_LOOP)
        calls.append(f"_set_loop(optimizer, foreach={foreach}, fused={fused})")
    if policy.in_backward:
        imports.append("import threading")
        helpers.append(_IN_BACKWARD)
        calls.append("_step_in_backward(optimizer)")
        notes.append(
            "optimizer in-backward: optimizer.step() then finds no gradients; keep the call for schedulers. Do not "
            "clip, scale or accumulate gradients: unlike memprof, this code does not stop a job that does."
        )
    return Code(tuple(imports), tuple(helpers), tuple(calls), needs_optimizer=True, notes=tuple(notes))


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


def shard_code(policy: Shard) -> tuple[Code, tuple[str, ...]]:
    """Returns the code of a stage 2 or 3 shard, and the statements of ``shard(model)``."""
    imports = [
        "import torch.distributed as dist",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.fsdp import fully_shard",
    ]
    if policy.units:
        imports += MODULES_IMPORTS
    else:
        imports.append("from torch import nn")
    ranks = policy.world_size
    body = (
        "device = next(model.parameters()).device.type",
        "if not dist.is_initialized():",
        '    dist.init_process_group("nccl" if device == "cuda" else "gloo")',
        f"if dist.get_world_size() != {ranks}:",
        f'    raise ValueError("The plan is for {ranks} ranks: start with torchrun --nproc-per-node {ranks}")',
        "for tensor in (*model.parameters(), *model.buffers()):",
        "    dist.broadcast(tensor.detach(), 0)  # all ranks start with the values of rank 0",
        f"mesh = init_device_mesh(device, ({ranks},))",
        *divide_statements(policy),
    )
    return Code(imports=tuple(imports), helpers=(MODULES if policy.units else _LAYERS,)), body


def divide_statements(policy: Shard) -> tuple[str, ...]:
    """Returns the statements that shard ``model`` over ``mesh``."""
    units = call("_modules", "model", list_of(expressions(policy.units))) if policy.units else "_layers(model)"
    reshards = policy.stage == 3 and policy.reshard_after_forward
    return (
        f"for module in {units}.values():",
        "    if next(module.parameters(), None) is not None:",
        f"        fully_shard(module, mesh=mesh, reshard_after_forward={reshards})",
        "# The root's own parameters are needed first in backward.",
        "fully_shard(model, mesh=mesh, reshard_after_forward=False)",
    )
