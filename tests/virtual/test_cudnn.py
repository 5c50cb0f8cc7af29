"""What cuDNN states for convolutions, from recorded answers of 9.19.0 (``cudnn/``), beside workspaces of an H200.

``make test-cudnn`` installs the library: then it is asked anew, and the rule for partial sums is checked against it.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from memprof.analysis.allocator.uncertainty import beyond_tensors
from memprof.machines.card import find_card
from memprof.machines.outside import workspace_interval
from memprof.replay.allocator.rules import settings_from_options
from memprof.trace.store import Trace
from memprof.virtual.cudnn.answers import Answers, describe
from memprof.virtual.cudnn.library import Call, CudnnError, Library, Rules, Tensor, find_library
from memprof.virtual.cudnn.partial_sums import bytes_on_card
from memprof.virtual.device.kernels.convolved import LAYOUTS, Convolutions
from memprof.virtual.device.memory import FREE, RELEASE, RESULTS, VirtualMemory, result_at
from memprof.virtual.device.pinned import PinnedMemory
from memprof.virtual.device.virtual_device import VirtualEvents

RECORDED = Path(__file__).parent / "cudnn"
_VERSION, _MIB = 91_900, 1 << 20
_FP32, _BF16 = torch.float32, torch.bfloat16
_aten = torch.ops.aten
#: Set by `make test-cudnn`.
_LIBRARY = None if os.environ.get("MEMPROF_CUDNN") == "0" else find_library()
with_library = pytest.mark.skipif(_LIBRARY is None, reason="needs cuDNN: make test-cudnn")

#: From recordings of an H200 under torch 2.11 and cuDNN 9.19 (tests/real_gpus/recordings): type, input, weight, stride,
#: and the workspace, rounded to 512 bytes. Those with partial sums are marked; no answer without a GPU has them.
FORWARD = (
    (_FP32, (64, 3, 224, 224), (64, 3, 7, 7), 2, 244_093_952),
    (_FP32, (64, 64, 56, 56), (64, 64, 3, 3), 1, 102_908_416),
    (_FP32, (64, 256, 28, 28), (256, 256, 3, 3), 2, 74_973_696),  # partial sums
    (_FP32, (64, 256, 14, 14), (256, 256, 3, 3), 1, 36_438_528),  # partial sums
    (_FP32, (64, 512, 14, 14), (512, 512, 3, 3), 2, 41_550_336),
    (_FP32, (64, 512, 7, 7), (512, 512, 3, 3), 1, 22_282_752),
    (_FP32, (64, 256, 56, 56), (512, 256, 1, 1), 2, 206_045_696),
    (_FP32, (64, 512, 7, 7), (2048, 512, 1, 1), 1, 32_113_152),
    (_FP32, (64, 256, 14, 14), (1024, 256, 1, 1), 1, 0),
    (_BF16, (64, 3, 224, 224), (64, 3, 7, 7), 2, 154_191_360),
    (_BF16, (64, 64, 56, 56), (64, 64, 3, 3), 1, 51_454_464),
    (_BF16, (64, 128, 28, 28), (128, 128, 3, 3), 1, 25_985_536),
    (_BF16, (64, 256, 14, 14), (256, 256, 3, 3), 1, 14_025_216),
    (_BF16, (64, 512, 7, 7), (512, 512, 3, 3), 1, 11_141_632),
    (_BF16, (64, 1024, 14, 14), (256, 1024, 1, 1), 1, 0),
    (_BF16, (64, 1024, 14, 14), (512, 1024, 1, 1), 1, 38_535_680),
)
WEIGHT = (
    (_FP32, (64, 3, 224, 224), (64, 3, 7, 7), 2, 262_972_928),
    (_FP32, (64, 128, 56, 56), (128, 128, 3, 3), 2, 137_298_944),  # partial sums, as in the next three
    (_FP32, (64, 256, 28, 28), (256, 256, 3, 3), 2, 73_663_488),
    (_FP32, (64, 512, 7, 7), (512, 512, 3, 3), 1, 30_934_016),
    (_FP32, (64, 2048, 7, 7), (512, 2048, 1, 1), 1, 40_501_760),
    (_FP32, (64, 256, 14, 14), (1024, 256, 1, 1), 1, 67_108_864),
    (_BF16, (64, 128, 28, 28), (128, 128, 3, 3), 1, 28_344_832),  # partial sums, as in the next three
    (_BF16, (64, 64, 56, 56), (64, 64, 3, 3), 1, 53_371_904),
    (_BF16, (64, 256, 56, 56), (512, 256, 1, 1), 2, 155_714_560),
    (_BF16, (64, 256, 14, 14), (1024, 256, 1, 1), 1, 34_210_304),
    (_BF16, (64, 512, 28, 28), (256, 512, 1, 1), 1, 33_554_432),
)


def recorded_answers() -> Answers:
    """Returns answers for an H200, without the library."""
    return Answers(find_card("h200"), _VERSION, _VERSION, RECORDED, None)


def convolution(dtype: torch.dtype, shape: tuple[int, ...], kernel: tuple[int, ...], stride: int) -> tuple[Any, ...]:
    """Returns a convolution's arguments and its result, on no device."""
    tensor, weight = (torch.empty(sizes, dtype=dtype, device="meta") for sizes in (shape, kernel))
    settings = ([stride] * 2, [kernel[-1] // 2] * 2, [1, 1], False, [0, 0], 1)
    return tensor, weight, settings, _aten.convolution.default(tensor, weight, None, *settings)


def rounded(size: int) -> int:
    """Rounds as the allocator does."""
    return -(-size // 512) * 512


@pytest.mark.parametrize(("dtype", "shape", "kernel", "stride", "workspace"), FORWARD)
def test_a_result_takes_what_an_h200_took(dtype, shape, kernel, stride, workspace) -> None:
    """To the byte, from the shape, the card's name and answers that cuDNN gives without one."""
    tensor, weight, settings, result = convolution(dtype, shape, kernel, stride)
    convolutions = Convolutions(recorded_answers(), has_tf32=True)
    steps = convolutions.steps_of(_aten.convolution.default, (tensor, weight, None, *settings), result)
    assert steps is not None
    assert steps[0] == RESULTS
    assert [rounded(size) for size in steps[1:]] == ([workspace] if workspace else [])


@pytest.mark.parametrize(("dtype", "shape", "kernel", "stride", "workspace"), WEIGHT)
def test_a_weight_s_gradient_takes_what_an_h200_took(dtype, shape, kernel, stride, workspace) -> None:
    """Blocks that the allocator does not split are up to 1 MiB larger."""
    tensor, weight, settings, result = convolution(dtype, shape, kernel, stride)
    arguments = (result, tensor, weight, None, *settings, [False, True, False])
    convolutions = Convolutions(recorded_answers(), has_tf32=True)
    steps = convolutions.steps_of(_aten.convolution_backward.default, arguments, None)
    assert steps is not None
    assert steps[0] == result_at(1)
    assert steps[2] == FREE
    assert 0 <= workspace - rounded(steps[1]) <= _MIB


def test_benchmark_tries_the_largest_workspace_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allocates once for all engines it times, releases its free memory, then allocates for the one it takes."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    tensor, weight, settings, result = convolution(_FP32, (64, 3, 224, 224), (64, 3, 7, 7), 2)
    convolutions, arguments = Convolutions(recorded_answers(), has_tf32=True), (tensor, weight, None, *settings)
    first, again = (convolutions.steps_of(_aten.convolution.default, arguments, result) for _ in range(2))
    assert first == [RESULTS, 256_951_312, FREE, RELEASE, 244_093_712]
    assert again == [RESULTS, 244_093_712]


def test_what_was_never_asked_is_estimated_without_the_library() -> None:
    """As is what cuDNN does not get: depthwise convolutions have kernels of torch's own."""
    tensor, weight, settings, result = convolution(_FP32, (2, 24, 30, 30), (48, 24, 3, 3), 1)
    arguments = (tensor, weight, None, *settings)
    asked, estimated = (
        Convolutions(answers, has_tf32=True).steps_of(_aten.convolution.default, arguments, result)
        for answers in (recorded_answers(), None)
    )
    assert asked == estimated == [RESULTS, tensor.nbytes + weight.nbytes + result.nbytes + 256]


def test_two_types_are_refused_as_on_a_card() -> None:
    """Without a bias, which torch compares before."""
    tensor, weight = torch.empty(2, 3, 8, 8, dtype=torch.float16), torch.empty(4, 3, 3, 3)
    with pytest.raises(RuntimeError, match=r"\(torch.cuda.HalfTensor\) and weight type \(torch.cuda.FloatTensor\)"):
        LAYOUTS[_aten.convolution.default](tensor, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def test_a_library_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header states the version; it is not loaded."""
    library = tmp_path / "cudnn" / "lib" / "libcudnn.so.9"
    header = tmp_path / "cudnn" / "include" / "cudnn_version.h"
    for path in (library, header):
        path.parent.mkdir(parents=True)
    library.touch()
    header.write_text("#define CUDNN_MAJOR 9\n#define CUDNN_MINOR 5\n#define CUDNN_PATCHLEVEL 1\n")
    monkeypatch.setenv("MEMPROF_CUDNN", "1")
    monkeypatch.setattr("memprof.virtual.cudnn.answers.find_library", lambda: library)
    answers = Answers.find(find_card("h200"), "2.13.0+cpu")
    assert answers.name == ""
    assert answers.problem == "version 9.5.1 cannot be asked without a GPU, 9.8 and newer can"


@pytest.mark.parametrize("is_old", [False, True])
def test_without_cudnn_one_image_s_windows_are_columns(is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the job turns it off, and for bf16 before Ampere; both gradients take as much, 1 x 1 kernels nothing."""
    monkeypatch.setattr(torch.backends.cudnn, "enabled", is_old)
    convolutions = Convolutions(recorded_answers(), has_tf32=not is_old)
    tensor, weight, settings, result = convolution(_BF16, (64, 512, 7, 7), (512, 512, 3, 3), 1)
    columns = 512 * 9 * 49 * 2
    assert convolutions.steps_of(_aten.convolution.default, (tensor, weight, None, *settings), result) == [
        *(RESULTS, columns)
    ]
    arguments = (result, tensor, weight, None, *settings, [True, True, False])
    assert convolutions.steps_of(_aten.convolution_backward.default, arguments, None) == [
        *(result_at(0), columns, FREE, result_at(1), columns, FREE)
    ]
    tensor, weight, settings, result = convolution(_BF16, (64, 512, 7, 7), (512, 512, 1, 1), 1)
    arguments = (tensor, weight, None, *settings)
    assert convolutions.steps_of(_aten.convolution.default, arguments, result) == [RESULTS]


def test_without_tf32_nothing_is_copied_for_tensor_cores() -> None:
    """A V100 took 904,212,480 bytes in all for this convolution (pytorch issue 50990), with input and result."""
    tensor, weight, settings, result = convolution(_FP32, (512, 32, 84, 84), (32, 32, 3, 3), 1)
    arguments = (tensor, weight, None, *settings)
    assert Convolutions(None, has_tf32=False).steps_of(_aten.convolution.default, arguments, result) == [RESULTS]


def test_the_interval_is_narrow_where_cudnn_was_asked() -> None:
    """One wave of partial sums either way, and no more than was counted below."""
    assert workspace_interval(200 * _MIB, _MIB, is_asked=True) == (-16 * _MIB, 16 * _MIB)
    assert workspace_interval(4 * _MIB, _MIB, is_asked=True) == (-4 * _MIB, 16 * _MIB)
    assert workspace_interval(4 * _MIB, _MIB) == (-4 * _MIB, 129 * _MIB)


def test_a_damaged_cache_is_asked_anew(tmp_path: Path) -> None:
    """A process that was killed leaves part of a line, a disk anything; other answers are read."""
    shutil.copy(RECORDED / "91900-9.0-132.tsv", tmp_path)
    with (tmp_path / "91900-9.0-132.tsv").open("ab") as file:
        file.write(b"\xff\xfe\x00\t1\nforward 0 1x1x1x1\t12")
    answers = Answers(find_card("h200"), _VERSION, _VERSION, tmp_path, None)
    tensor, weight, settings, result = convolution(_BF16, (64, 512, 7, 7), (512, 512, 3, 3), 1)
    steps = Convolutions(answers, has_tf32=True).steps_of(
        _aten.convolution.default, (tensor, weight, None, *settings), result
    )
    assert steps == [RESULTS, 11_141_136]


def test_a_library_that_cannot_be_loaded_is_none(tmp_path: Path) -> None:
    """Workspaces are estimated, and the device's record does not say that cuDNN was asked."""
    path = tmp_path / "libcudnn.so.9"
    path.touch()
    answers = Answers(find_card("h200"), _VERSION, _VERSION, tmp_path, path)
    assert answers.name == "9.19.0"
    tensor, weight, settings, result = convolution(_FP32, (2, 24, 30, 30), (48, 24, 3, 3), 1)
    log = Mock()
    events = VirtualEvents(log, VirtualMemory(settings_from_options({})), find_card("h200"), answers, PinnedMemory({}))
    events.sample()
    steps, estimated = (
        Convolutions(each, has_tf32=True).steps_of(_aten.convolution.default, (tensor, weight, None, *settings), result)
        for each in (answers, None)
    )
    assert steps == estimated
    events.sample()
    events.sample()
    assert [call.args[1]["cudnn"] for call in log.record.call_args_list] == ["9.19.0", ""]


def contiguous(*sizes: int) -> Tensor:
    return Tensor(sizes, tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes))))


@with_library
@pytest.mark.parametrize("kind", ["forward", "data", "weight"])
def test_the_rule_for_partial_sums_is_cudnn_s(kind: str) -> None:
    """For 18 processors, as many as cuDNN assumes, it gives what cuDNN states: in 19 of 20 of 60 calls or more."""
    assert _LIBRARY is not None
    library, checked, wrong = Library(_LIBRARY, describe(find_card("h200"))), 0, []
    for dtype in (0, 9):
        for side in (7, 14, 28, 32, 56):
            for channels in (64, 128, 256, 320, 512, 640):
                image = contiguous(16, channels, side, side)
                call = Call(kind, dtype, image, contiguous(channels, channels, 3, 3), image, (1, 1), (1, 1), (1, 1))
                candidate = next(library.candidates(call, Rules()))
                checked += 1
                if not bytes_on_card(library, call, candidate, 132)[1]:
                    wrong.append(call.key())
    assert len(wrong) <= checked // 20, wrong


@with_library
@pytest.mark.parametrize(("dtype", "shape", "kernel", "stride", "workspace"), FORWARD)
def test_the_library_states_what_was_recorded(dtype, shape, kernel, stride, workspace, tmp_path) -> None:
    """Asked anew, 9.19 and 9.20 state what an H200 took."""
    tensor, weight, settings, result = convolution(dtype, shape, kernel, stride)
    arguments = (tensor, weight, None, *settings)
    answers = Answers(find_card("h200"), _VERSION, _VERSION, tmp_path, _LIBRARY)
    steps = Convolutions(answers, has_tf32=True).steps_of(_aten.convolution.default, arguments, result)
    assert steps is not None
    assert [rounded(size) for size in steps[1:]] == ([workspace] if workspace else [])


@with_library
def test_answers_are_kept(tmp_path: Path) -> None:
    """A second process that has no library reads what the first one asked."""
    assert _LIBRARY is not None
    tensor, weight, settings, result = convolution(_FP32, (2, 24, 30, 30), (48, 24, 3, 3), 1)
    arguments, found = (tensor, weight, None, *settings), []
    for path in (_LIBRARY, None):
        answers = Answers(find_card("rtx4090"), _VERSION, _VERSION, tmp_path, path)
        steps = Convolutions(answers, has_tf32=True).steps_of(_aten.convolution.default, arguments, result)
        found.append(steps)
    assert found[0] == found[1]
    assert (tmp_path / "91900-8.9-128.tsv").stat().st_mode & 0o077 == 0


@with_library
def test_a_device_it_does_not_know_is_refused() -> None:
    """One whose compute capability it cannot plan for."""
    assert _LIBRARY is not None
    with pytest.raises(CudnnError, match="cuDNN"):
        Library(_LIBRARY, describe(find_card("h200")) | {"deviceVer": 310})


@with_library
def test_cudnn_returns_what_describes_a_device() -> None:
    """As `memprof doctor --describe-card` prints it for a card; one that is missing is cuDNN's error."""
    assert _LIBRARY is not None
    described = describe(find_card("h200"))
    assert Library(_LIBRARY, described).describe_device() == described
    if not torch.cuda.is_available():
        with pytest.raises(CudnnError, match="cuDNN"):
            Library(_LIBRARY, 0)


@with_library
def test_a_dry_run_asks_cudnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line: the recording says so, and its verdict's interval is that of an answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines = (
        *("import torch", "model = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda()"),
        *("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", "for _ in range(2):"),
        *("    model(torch.zeros(64, 64, 56, 56, device='cuda')).sum().backward()", "    optimizer.step()"),
    )
    (tmp_path / "job.py").write_text("\n".join(lines), encoding="utf-8")
    command = ("-m", "memprof", "record", "--dry-run", "--device", "h200", "-o", "job.memprof", "job.py")
    subprocess.run([sys.executable, *command], cwd=tmp_path, check=True)
    trace = Trace.open(tmp_path / "job.memprof")
    assert trace.manifest.machine.cudnn
    assert beyond_tensors(trace).workspace_bytes[1] == 16 * _MIB
