"""Keeps torch.compile away from the recorder's own functions."""

from __future__ import annotations

import sys
from typing import Any

#: Where TorchDynamo keeps `torch.nn.Module.__init__` as it was when it was imported: it traces that one.
_INITIALIZER, _KEEPERS = "unpatched_nn_module_init", ("torch._dynamo.mutation_guard", "torch._dynamo.variables.misc")


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
