"""Processors on which oneDNN has other kernels than on this one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_RECURRENT = """
import torch
from memprof.errors import PolicyError
from memprof.policies.precision.policy import Precision
from memprof.policies.runtime.job import Job
try:
    Precision("bf16").apply(Job(torch.nn.LSTM(2, 2)))
except PolicyError as error:
    assert "cannot train recurrent layers in bf16 on this processor" in str(error)
else:
    raise AssertionError
"""


def _run_at(level: str, code: str) -> int:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": level}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode


def test_recurrent_layers_are_refused_where_onednn_has_none() -> None:
    """Torch would end the job in its first step: it could not create a primitive."""
    assert _run_at("AVX2", _RECURRENT) == 0


@pytest.mark.parametrize("level", ["", "AVX", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_AMX", "ALL"])
def test_types_are_those_that_torch_asks_onednn_for(level: str) -> None:
    """The recorder reads them off the processor's instructions, since the job would see torch's own question."""
    ask = (
        "import torch; from memprof.recorder.machine import short_types; "
        "ops = torch.ops.mkldnn; names = {'bfloat16': 'bf16', 'float16': 'fp16'}; "
        "assert short_types() == [n for n, s in names.items() if getattr(ops, f'_is_mkldnn_{s}_supported')()]"
    )
    assert _run_at(level, ask) == 0
