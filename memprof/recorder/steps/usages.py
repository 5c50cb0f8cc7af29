"""Notes what a job does in its steps that no operator shows, also that it saves or loads a checkpoint."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import torch

from memprof.trace.files.spool import LOADING, SAVING
from memprof.trace.usages import (
    CHANGES_SETTINGS,
    COLLECTOR_OFF,
    COMPILES_MODELS,
    FORMS,
    GRADIENT_HOOKS,
    IDLE_CHECKPOINTS,
    IS_LBFGS,
    NEEDS_CLOSURE,
    SETS_LEARNING_RATE,
    TRAINED_IN_EVALUATION,
    WITHOUT_GRADIENT,
)

#: With a higher threshold, the collector runs rarely.
_THRESHOLD = 10_000
_PLAIN = (bool, int, float, str)
#: Checkpoint functions by the end of their file's name; a trailing * matches any function name with that prefix.
_FUNCTIONS: dict[str, dict[str, int]] = {
    "torch/serialization.py": {"save": SAVING, "load": LOADING},
    "torch/jit/_serialization.py": {"save": SAVING, "load": LOADING},
    "torch/nn/modules/module.py": {"state_dict": SAVING, "load_state_dict": LOADING},
    "torch/optim/optimizer.py": {"state_dict": SAVING, "load_state_dict": LOADING},
    "torch/distributed/checkpoint/state_dict_saver.py": {"*": SAVING},
    "torch/distributed/checkpoint/state_dict_loader.py": {"*": LOADING},
    "torch/distributed/checkpoint/state_dict.py": {"get_*": SAVING, "set_*": LOADING},
    "safetensors/torch.py": {"save*": SAVING, "load*": LOADING},
    "memprof/virtual/tensors/files.py": {"save": SAVING, "load": LOADING},  # replaces torch.save and torch.load
}
_FILES = {name.rpartition("/")[2] for name in _FUNCTIONS}
#: The tensor method that `copy.deepcopy` calls.
COPYING = "__deepcopy__"
_COPY_FILE = "copy.py"
_BETWEEN = ("torch", "memprof")
_TENSOR_FILES = ("torch/_tensor.py", "torch/nn/parameter.py")


class Usages:
    """What was seen in the recorded steps.

    Attributes:
        seen: Names of ``memprof.trace.usages``, in order of occurrence.
        optimizers: The optimizers that have updated: the class, and what its updates need or have.
    """

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}
        self.optimizers: dict[str, None] = {}
        self._without_gradient: set[int] = set()  # modules
        self._settings: dict[int, list[dict[str, Any]]] = {}
        self._rates: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._recorded: dict[str, Any] = {"seen": [], "optimizers": []}

    def begin_step(self) -> None:
        """Forgets the settings of the last step's backward."""
        self._settings.clear()

    def begin_backward(self, optimizers: Iterable[Any]) -> None:
        """Notes with which settings the job's optimizers enter backward."""
        for optimizer in optimizers:
            self._settings[id(optimizer)] = plain_settings(optimizer)

    def train_in_evaluation(self) -> None:
        """Notes that backward runs through a model in evaluation mode."""
        self.seen[TRAINED_IN_EVALUATION] = None

    def find_idle_checkpoints(self, modules: Iterable[int]) -> None:
        """Notes the modules that train in evaluation mode, where their gradient checkpointing does nothing."""
        if ids := " ".join(map(str, modules)):
            self.seen[f"{IDLE_CHECKPOINTS} {ids}"] = None

    def compile_model(self) -> None:
        """Notes that a model which runs eagerly here is compiled in a real run."""
        self.seen[COMPILES_MODELS] = None

    def begin_update(self, optimizer: Any, module_of: Callable[[torch.Tensor], int]) -> None:
        """Notes how an optimizer that is about to update was used.

        Args:
            optimizer: The optimizer.
            module_of: Returns the id of a parameter's module, -1 if no model contains it.
        """
        self.optimizers[_describe(optimizer)] = None
        left = self._settings.pop(id(optimizer), None)
        if left is not None and left != plain_settings(optimizer):
            self.seen[CHANGES_SETTINGS] = None
        rates = _own_rates(optimizer)
        if self._rates.get(optimizer, rates) != rates:
            self.seen[SETS_LEARNING_RATE] = None
        self._rates[optimizer] = rates
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if any(has_gradient_hooks(each) for each in parameters):
            self.seen[GRADIENT_HOOKS] = None
        without = [each for each in parameters if each.requires_grad and each.is_leaf and each.grad is None]
        self._without_gradient.update(map(module_of, without))

    def take_news(self) -> dict[str, Any] | None:
        """Returns the record of the ``usages`` stream, which replaces earlier ones; None if nothing has changed."""
        if not gc.isenabled() or not 0 < max(gc.get_threshold()) <= _THRESHOLD or not gc.get_threshold()[0]:
            self.seen[COLLECTOR_OFF] = None
        without = " ".join(map(str, (WITHOUT_GRADIENT, *sorted(self._without_gradient))))
        record = {
            "seen": [*self.seen, *([without] if self._without_gradient else [])],
            "optimizers": list(self.optimizers),
            "threads": torch.get_num_threads(),  # which the job may set itself
        }
        if record == self._recorded:
            return None
        self._recorded = record
        return record


def state_of(optimizer: Any) -> Any:
    """Returns an optimizer's state, which a plan may hide from the job between backward and the step."""
    return getattr(optimizer.state, "real", optimizer.state)


def plain_settings(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the settings an update reads, plain values only: comparing tensors would synchronise with the device."""
    return [{k: v for k, v in group.items() if _is_plain(v)} for group in optimizer.param_groups]


def _own_rates(optimizer: Any) -> list[Any]:
    """Returns the learning rates that the job sets itself; torch's schedulers mark those that they set."""
    rates = (group.get("lr") for group in optimizer.param_groups if "initial_lr" not in group)
    return [rate if _is_plain(rate) else None for rate in rates]


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value))


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether a hook of the job runs when a parameter's gradient is complete; those of policies are not the job's."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    owners = (getattr(hook, "__self__", None) for hook in hooks.values())
    return any(not type(owner).__module__.startswith("memprof.") for owner in owners)


def needs_closure(kind: type[Any]) -> bool:
    """Whether an optimizer's class cannot update without a closure that recomputes the loss."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def has_form(optimizer: Any, form: str) -> bool:
    """Whether an optimizer takes a form of updates: foreach, or fused with the parameters and gradients it has now."""
    groups = optimizer.param_groups
    if not all(form in group and not group.get("differentiable") for group in groups) or _has_own_step(type(optimizer)):
        return False
    return form != "fused" or all(takes_fused(optimizer, each) for group in groups for each in group["params"])


def takes_fused(optimizer: Any, parameter: torch.Tensor) -> bool:
    """Whether a fused kernel updates a parameter correctly.

    On the CPU, torch's kernels (2.13) read the parameter, its gradient and its state as if these had one dense layout,
    whatever theirs are, and SGD's leaves parameters of 16 bits as they are; other devices' raise an error.
    """
    with torch._C.DisableTorchFunction():
        is_short = parameter.device.type == "cpu" and parameter.element_size() == 2
        if not parameter.is_floating_point() or (is_short and isinstance(optimizer, torch.optim.SGD)):
            return False
        if parameter.grad is None:
            return True
        state = state_of(optimizer).get(parameter, {}).values()
        read = [parameter.grad, *(each for each in state if isinstance(each, torch.Tensor) and each.dim())]
        layout = dense_layout(parameter)
        return layout is not None and all(dense_layout(each) == layout for each in read)


def dense_layout(tensor: torch.Tensor) -> list[tuple[int, int]] | None:
    """Returns strides and sizes of the dimensions that have several elements; None if there are gaps or overlaps."""
    if tensor.layout is not torch.strided:
        return None
    strides, expected = [each for each in zip(tensor.stride(), tensor.shape, strict=True) if each[1] != 1], 1
    for stride, size in sorted(strides):
        if stride != expected:
            return None
        expected *= max(size, 1)
    return strides


def _has_own_step(kind: type[Any]) -> bool:
    """Whether a class updates in code outside torch that does not end in the ``step`` of the class that it extends."""
    steps = (vars(each)["step"] for each in kind.__mro__ if "step" in vars(each))
    step = next(each for each in steps if not each.__module__.startswith("memprof."))
    names = getattr(inspect.unwrap(step), "__code__", _has_own_step.__code__).co_names
    return not (step.__module__.startswith("torch.optim.") or {"super", "step"} <= {*names})


def _describe(optimizer: Any) -> str:
    kind = type(optimizer)
    words = [kind.__name__, *(form for form in FORMS if has_form(optimizer, form))]
    if needs_closure(kind):
        words.append(NEEDS_CLOSURE)
    if isinstance(optimizer, torch.optim.LBFGS):
        words.append(IS_LBFGS)
    return " ".join(words)


def storing_phase(code: CodeType) -> int:
    """Returns the phase of a function: SAVING or LOADING of ``trace.spool``, -1 for all others."""
    file = code.co_filename.replace("\\", "/")
    if file.rpartition("/")[2] not in _FILES:
        return -1
    functions = next((names for end, names in _FUNCTIONS.items() if file.endswith(f"/{end}")), {})
    for name, phase in functions.items():
        if code.co_name == name or (name.endswith("*") and code.co_name.startswith(name[:-1])):
            return phase
    return -1


def copies_state_dict(frame: FrameType | None) -> bool:
    """Whether a stack is that of ``copy.deepcopy(model.state_dict())``, judging by how `copy` reaches its tensors.

    An ordered dict is rebuilt by ``_reconstruct``, which copies its values itself; a module's tensors are in plain
    dicts, which have their own function.
    """
    while frame is not None and not _is_of(frame, COPYING, _TENSOR_FILES):
        frame = frame.f_back
    # A tensor subclass goes through torch's overrides, and in a dry run through memprof's.
    while frame is not None and not _is_copying(frame) and any(each in frame.f_code.co_filename for each in _BETWEEN):
        frame = frame.f_back
    names = []
    while frame is not None and _is_copying(frame):
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[:2] == ["deepcopy", "_reconstruct"] and names.count("_reconstruct") == 1


def _is_copying(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "copy" and frame.f_code.co_filename.endswith(_COPY_FILE)


def _is_of(frame: FrameType, name: str, files: tuple[str, ...]) -> bool:
    return frame.f_code.co_name == name and frame.f_code.co_filename.replace("\\", "/").endswith(files)
