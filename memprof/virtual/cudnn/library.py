"""cuDNN's backend API by ctypes: heuristics and workspaces of a convolution on a device that is only described.

Since cuDNN 9.8 a device may be given as JSON (``CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR``): heuristics rank the engines for
it, and plans state their workspaces, without a driver. Nothing is computed. Enumerations are those of
``cudnn_graph.h``, the order of calls is that of torch's ``aten/src/ATen/native/cudnn/Conv_v8.cpp``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.errors import MemprofError

#: The first version that takes a device as JSON.
FIRST_VERSION = 90_800
_NOT_A_DEVICE = 3007
# Descriptors.
_CONVOLUTION, _ENGINE, _CONFIG, _HEURISTICS, _PLAN, _KNOB = 1, 2, 3, 4, 5, 7
_GRAPH, _TENSOR, _DEVICE = 15, 17, 38
# Types of attributes.
_TYPE, _INT64, _FLOAT, _MODE, _HEURISTICS_MODE, _KNOB_TYPE, _NOTE, _DESCRIPTOR, _INT32, _CHAR = (
    *(1, 3, 4, 7, 8, 9, 11),
    *(15, 23, 24),
)
#: Operations: descriptor; attributes of alpha, beta, convolution, w, x and y.
_OPERATIONS = {
    "forward": (10, 700, 701, 702, 703, 704, 705),
    "data": (12, 706, 707, 708, 709, 710, 711),
    "weight": (11, 712, 713, 714, 715, 716, 717),
}
#: Numerical notes that torch filters engines by.
_TENSOR_CORE, _DOWN_CONVERT, _NONDETERMINISTIC = 0, 1, 4
#: Modes of heuristics that torch uses: the first, and the fallback.
_MODES = {"instant": 0, "fallback": 2}
#: Alignment of tensors in torch's allocator, as torch states it to cuDNN.
_ALIGNMENT = 32
#: More than an engine has.
_MOST_KNOBS = 32


class CudnnError(MemprofError):
    """cuDNN refused a call."""

    def __init__(self, status: int, message: str) -> None:
        """Builds the message."""
        super().__init__(f"cuDNN: {message} (status {status})")


@dataclass(frozen=True)
class Tensor:
    """A tensor as cuDNN sees it: sizes and strides in elements, batch and channels first."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def dense(cls, sizes: Sequence[int], *, is_channels_last: bool = False) -> Tensor:
        """Returns a tensor without gaps, contiguous or with its channels last in memory."""
        order = [0, *range(2, len(sizes)), 1] if is_channels_last else range(len(sizes))
        strides, step = [0] * len(sizes), 1
        for place in reversed(order):
            strides[place] = step
            step *= sizes[place]
        return cls(tuple(sizes), tuple(strides))


@dataclass(frozen=True)
class Call:
    """One call of a convolution.

    Attributes:
        kind: ``forward``, ``data`` or ``weight``: the result, or the gradient that is computed.
        dtype: cuDNN's number of the type: 0 fp32, 1 fp64, 2 fp16, 9 bf16.
        x: The input.
        w: The weight.
        y: The result.
        stride: Of each dimension in space, as are
        padding: and
        dilation: these.
    """

    kind: str
    dtype: int
    x: Tensor
    w: Tensor
    y: Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def key(self) -> str:
        """Returns what distinguishes it from other calls, as text."""
        tensors = ("x".join(map(str, one.sizes)) + "/" + "x".join(map(str, one.strides)) for one in self.tensors)
        options = ("x".join(map(str, one)) for one in (self.stride, self.padding, self.dilation))
        return " ".join((self.kind, str(self.dtype), *tensors, *options))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Input, weight and result."""
        return self.x, self.w, self.y


@dataclass(frozen=True)
class Rules:
    """By what torch chooses engines.

    Attributes:
        is_deterministic: As ``torch.backends.cudnn.deterministic``.
        allows_tf32: Whether fp32 may be computed in TF32.
        is_timed: As ``torch.backends.cudnn.benchmark``: engines are timed, with one workspace for all.
    """

    is_deterministic: bool = False
    allows_tf32: bool = True
    is_timed: bool = False


@dataclass(frozen=True)
class Candidate:
    """An engine with its choices.

    Attributes:
        engine: Its number among those of the operation.
        knobs: Its choices by type of knob.
        workspace_bytes: What its plan needs.
    """

    engine: int
    knobs: dict[int, int]
    workspace_bytes: int


def find_library() -> Path | None:
    """Returns cuDNN's main library in the packages of this Python, with which CUDA builds of torch come, or None."""
    found = importlib.util.find_spec("nvidia")
    for folder in [] if found is None else found.submodule_search_locations or []:
        for path in sorted(Path(folder).glob("cudnn/lib/libcudnn.so.*")):
            return path
    return None


def version_beside(path: Path) -> int:
    """Returns the version that the header beside a library states, such as 91900, without loading it; 0 if none."""
    header = path.parent.parent / "include" / "cudnn_version.h"
    if not header.is_file():
        return 0
    text = header.read_text(encoding="utf-8", errors="replace")
    parts = [re.search(rf"define CUDNN_{name} (\d+)", text) for name in ("MAJOR", "MINOR", "PATCHLEVEL")]
    major, minor, patch = (int(part[1]) if part else 0 for part in parts)
    return major * 10_000 + minor * 100 + patch


class Library:
    """cuDNN, loaded, with one device that is described to it, or present."""

    def __init__(self, path: Path, device: dict[str, Any] | int) -> None:
        """Loads the library.

        Args:
            path: ``libcudnn.so``, which loads its sub-libraries on first use.
            device: Properties of the device (`describe`), or the number of a card of this machine.

        Raises:
            CudnnError: It is older than 9.8, does not know such a device, or finds no such card.
            OSError: It cannot be loaded.
        """
        self._library = ctypes.CDLL(str(path))
        self._library.cudnnGetVersion.restype = ctypes.c_size_t
        self.version = int(self._library.cudnnGetVersion())
        if self.version < FIRST_VERSION:
            raise CudnnError(_NOT_A_DEVICE, f"version {self.version} cannot be asked without a GPU; 9.8 can")
        self._device = self._new(_DEVICE)
        if isinstance(device, int):
            self._set(self._device, 2700, _INT32, (ctypes.c_int * 1)(device))
        else:
            text = json.dumps(device).encode() + b"\0"
            self._set(self._device, 2702, _CHAR, ctypes.create_string_buffer(text, len(text)), count=len(text))
        self._finish(self._device)

    def describe_device(self) -> dict[str, Any]:
        """Returns the device's properties as cuDNN holds them."""
        size = self._read(self._device, 2702, _CHAR, 0, None)
        text = ctypes.create_string_buffer(size)
        self._read(self._device, 2702, _CHAR, size, text)
        properties: dict[str, Any] = json.loads(text.value)
        return properties

    def candidates(self, call: Call, rules: Rules, mode: str = "instant") -> Iterator[Candidate]:
        """Yields engines in the order in which torch tries them, but for those that have no plan here.

        Args:
            call: The convolution.
            rules: What torch filters by.
            mode: ``instant``, or ``fallback``, which torch tries where no plan of the first runs.

        Raises:
            CudnnError: cuDNN does not take the call.
        """
        graph = self._graph(call)
        heuristics = self._new(_HEURISTICS)
        self._set(heuristics, 201, _DESCRIPTOR, _pointers(graph[0]))
        self._set(heuristics, 200, _HEURISTICS_MODE, (ctypes.c_int * 1)(_MODES[mode]))
        self._set(heuristics, 204, _DESCRIPTOR, _pointers(self._device))
        self._finish(heuristics)
        for config in self._get_descriptors(heuristics, 202, _CONFIG):
            engine = self._get_descriptors(config, 300, _ENGINE, most=1)[0]
            if self._is_filtered(self._get(engine, 1303, _NOTE, ctypes.c_int, 16), call.dtype, rules):
                continue
            knobs = {
                self._get(knob, 600, _KNOB_TYPE, ctypes.c_int)[0]: self._get(knob, 601, _INT64, ctypes.c_int64)[0]
                for knob in self._get_descriptors(config, 302, _KNOB, most=_MOST_KNOBS)
            }
            try:
                size = self._plan_bytes(config)
            except CudnnError:  # torch goes on with the next one, too
                continue
            yield Candidate(self._get(engine, 1301, _INT64, ctypes.c_int64)[0], knobs, size)

    def workspace_bytes(self, call: Call, engine: int, knobs: dict[int, int], processors: int = 0) -> int:
        """Returns what one engine needs.

        Args:
            call: The convolution.
            engine: Its number.
            knobs: Its choices.
            processors: The multiprocessors it may use; 0 for as many as cuDNN assumes.

        Raises:
            CudnnError: There is no such plan.
        """
        graph, descriptor, config = self._graph(call), self._new(_ENGINE), self._new(_CONFIG)
        self._set(descriptor, 1300, _DESCRIPTOR, _pointers(graph[0]))
        self._set(descriptor, 1301, _INT64, _integers(engine))
        self._set(descriptor, 1307, _DESCRIPTOR, _pointers(self._device))
        if processors:
            self._set(descriptor, 1306, _INT32, (ctypes.c_int * 1)(processors))
        self._finish(descriptor)
        choices = []
        for kind, value in knobs.items():
            choice = self._new(_KNOB)
            self._set(choice, 600, _KNOB_TYPE, (ctypes.c_int * 1)(kind))
            self._set(choice, 601, _INT64, _integers(value))
            self._finish(choice)
            choices.append(choice)
        self._set(config, 300, _DESCRIPTOR, _pointers(descriptor))
        if choices:
            self._set(config, 302, _DESCRIPTOR, _pointers(*choices))
        self._finish(config)
        return self._plan_bytes(config)

    @staticmethod
    def _is_filtered(notes: Sequence[int], dtype: int, rules: Rules) -> bool:
        """filterEngineConfigs, Conv_v8.cpp."""
        return (
            _DOWN_CONVERT in notes
            or (rules.is_deterministic and _NONDETERMINISTIC in notes)
            or (dtype == 0 and not rules.allows_tf32 and _TENSOR_CORE in notes)
        )

    def _graph(self, call: Call) -> tuple[_Descriptor, list[_Descriptor]]:
        """Returns a graph of one operation, and what it refers to."""
        kind, alpha, beta, convolution, *of_tensors = _OPERATIONS[call.kind]
        form, operation, graph = self._new(_CONVOLUTION), self._new(kind), self._new(_GRAPH)
        computed = 0 if call.dtype in (2, 9) else call.dtype  # half types are accumulated in fp32
        self._set(form, 100, _TYPE, (ctypes.c_int * 1)(computed))
        self._set(form, 101, _MODE, (ctypes.c_int * 1)(1))  # cross-correlation
        self._set(form, 106, _INT64, _integers(len(call.stride)))
        for attribute, values in ((102, call.dilation), (103, call.stride), (104, call.padding), (105, call.padding)):
            self._set(form, attribute, _INT64, _integers(*values))
        self._finish(form)
        made = [form]
        self._set(operation, convolution, _DESCRIPTOR, _pointers(form))
        for name, attribute, tensor in zip("wxy", of_tensors, (call.w, call.x, call.y), strict=True):
            descriptor = self._new(_TENSOR)
            self._set(descriptor, 901, _TYPE, (ctypes.c_int * 1)(call.dtype))
            self._set(descriptor, 902, _INT64, _integers(*tensor.sizes))
            self._set(descriptor, 903, _INT64, _integers(*tensor.strides))
            self._set(descriptor, 906, _INT64, _integers(ord(name)))
            self._set(descriptor, 900, _INT64, _integers(_ALIGNMENT))
            self._finish(descriptor)
            self._set(operation, attribute, _DESCRIPTOR, _pointers(descriptor))
            made.append(descriptor)
        for attribute, factor in ((alpha, 1.0), (beta, 0.0)):
            self._set(operation, attribute, _FLOAT, (ctypes.c_float * 1)(factor))
        self._finish(operation)
        self._set(graph, 801, _DESCRIPTOR, _pointers(operation))
        self._finish(graph)
        return graph, [*made, operation]

    def _plan_bytes(self, config: _Descriptor) -> int:
        plan = self._new(_PLAN)
        self._set(plan, 401, _DESCRIPTOR, _pointers(config))
        self._set(plan, 407, _DESCRIPTOR, _pointers(self._device))
        self._finish(plan)
        return int(self._get(plan, 402, _INT64, ctypes.c_int64)[0])

    def _new(self, kind: int) -> _Descriptor:
        return _Descriptor(self, kind)

    def _set(self, descriptor: _Descriptor, attribute: int, kind: int, values: Any, count: int = 0) -> None:
        pointer = ctypes.cast(values, ctypes.c_void_p)
        size = ctypes.c_int64(count or len(values))
        self._check(self._library.cudnnBackendSetAttribute(descriptor.pointer, attribute, kind, size, pointer))

    def _get(self, descriptor: _Descriptor, attribute: int, kind: int, of: Any, most: int = 1) -> list[int]:
        values = (of * most)()
        count = self._read(descriptor, attribute, kind, most, values)
        return list(values)[:count]

    def _get_descriptors(
        self, descriptor: _Descriptor, attribute: int, kind: int, most: int | None = None
    ) -> list[_Descriptor]:
        if most is None:
            most = self._read(descriptor, attribute, _DESCRIPTOR, 0, None)
        made = [self._new(kind) for _ in range(most)]
        return made[: self._read(descriptor, attribute, _DESCRIPTOR, most, _pointers(*made))]

    def _read(self, descriptor: _Descriptor, attribute: int, kind: int, most: int, values: Any) -> int:
        """Reads up to so many values of an attribute into an array, and returns how many there are."""
        count = ctypes.c_int64()
        self._check(
            self._library.cudnnBackendGetAttribute(
                *(descriptor.pointer, attribute, kind, ctypes.c_int64(most), ctypes.byref(count), values)
            )
        )
        return count.value

    def _finish(self, descriptor: _Descriptor) -> None:
        self._check(self._library.cudnnBackendFinalize(descriptor.pointer))

    def _check(self, status: int) -> None:
        if status:
            message = ctypes.create_string_buffer(512)
            self._library.cudnnGetLastErrorString(message, ctypes.c_size_t(len(message)))
            raise CudnnError(status, message.value.decode(errors="replace") or "the call was refused")


class _Descriptor:
    """A descriptor of cuDNN's, destroyed with this object."""

    def __init__(self, library: Library, kind: int) -> None:
        self._library = library._library
        self.pointer = ctypes.c_void_p()
        library._check(self._library.cudnnBackendCreateDescriptor(kind, ctypes.byref(self.pointer)))

    def __del__(self) -> None:
        if self.pointer.value:
            self._library.cudnnBackendDestroyDescriptor(self.pointer)


def _integers(*values: int) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _pointers(*descriptors: _Descriptor) -> Any:
    return (ctypes.c_void_p * len(descriptors))(*(one.pointer.value for one in descriptors))
