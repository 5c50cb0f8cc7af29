"""Keeps torch.compile away from the recorder's own functions."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

#: Where TorchDynamo keeps `torch.nn.Module.__init__` as it was when it was imported: it traces that one.
_INITIALIZER, _KEEPERS = "unpatched_nn_module_init", ("torch._dynamo.mutation_guard", "torch._dynamo.variables.misc")
#: Where TorchDynamo defines the function that `torch.compile` returns, whose code alone refers to this name.
_WRAPPER, _OF_WRAPPER = "torch._dynamo.eval_frame", "callback"


def skip_compiling(*functions: Any) -> None:
    """Keeps torch.compile from compiling the recorder's own functions and everything they call.

    Does not import torch._dynamo, which is slow and would change the job's modules.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
        for function in functions:
            eval_frame.set_code_exec_strategy(function.__code__, skip)
    except (ImportError, AttributeError):
        return  # this torch lacks the entry: compiled regions may be split around the recorder's calls


def trace_initializer(replaced: Any, original: Any) -> None:
    """Has TorchDynamo trace the original initializer of modules where it was imported while that was replaced.

    Args:
        replaced: What stood for ``torch.nn.Module.__init__``.
        original: The function itself.
    """
    for name in _KEEPERS:
        keeper = sys.modules.get(name)
        if getattr(keeper, _INITIALIZER, None) is replaced:
            setattr(keeper, _INITIALIZER, original)


def is_within_compiled_call() -> bool:
    """Whether a function that torch.compile has returned is running.

    When it returns, torch restores the dispatch keys of its start, whatever modes were pushed or popped meanwhile: one
    that was popped leaves keys that end the job at its next operator.
    """
    wrapper = sys.modules.get(_WRAPPER)
    if wrapper is None:
        return False
    name = wrapper.__file__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == name and _OF_WRAPPER in frame.f_code.co_freevars:
            return True
        frame = frame.f_back
    return False
