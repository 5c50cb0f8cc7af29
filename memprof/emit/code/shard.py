"""FSDP through torch's fully_shard, applied before the optimizer is created."""

from __future__ import annotations

from memprof.emit.code.pieces import MODULES, MODULES_IMPORTS, Code, call, expressions, list_of
from memprof.policies.shard.policy import Shard

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
