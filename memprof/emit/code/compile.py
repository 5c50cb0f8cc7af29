"""torch.compile on chosen modules, with a budget for the tensors they save."""

from __future__ import annotations

from memprof.emit.code.pieces import MODULES, MODULES_IMPORTS, Code, call, expressions, list_of
from memprof.policies.compile.policy import Compile

_UNDER_BUDGET = '''
def _compiler(budget):
    """Returns torch's compiler under an activation memory budget: a share of what it would save for backward."""

    def compile_under_budget(graph, inputs):
        with functorch_config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

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


def compile_code(policy: Compile) -> Code:
    """Returns the code of a compile policy."""
    imports = ["import torch", *MODULES_IMPORTS]
    helpers = [MODULES, _OUTERMOST]
    backend = ""
    if policy.activation_budget < 1:
        imports += [
            "import torch._functorch.config as functorch_config",
            "from torch._inductor.compile_fx import compile_fx",
        ]
        helpers.append(_UNDER_BUDGET)
        backend = f", backend=_compiler({policy.activation_budget!r})"
    calls = []
    if policy.activation_budget < 1 and policy.modules in (("",), (".",)):
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
    )
