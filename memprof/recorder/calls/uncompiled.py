"""Keeps torch.compile away from the recorder's own functions."""

from __future__ import annotations

from typing import Any


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
