"""Alternative updates of a torch optimizer: a loop over parameters, and updates inside backward."""

from __future__ import annotations

from memprof.emit.code.pieces import Code
from memprof.policies.optimizer.policy import OptimizerPolicy

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
