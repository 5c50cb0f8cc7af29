"""Checkpoints in a dry run: what it would have saved is loaded again as shapes, and so is what is on disk."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from memprof.recorder.dry.answers import line_of
from memprof.recorder.dry.safetensors import watch_safetensors
from memprof.recorder.dry.spans import mapped

#: Whole numbers up to so many are read: positions, lengths and counts, on which sizes may depend.
_MOST_DATA = 2**16


@dataclass(frozen=True)
class _Shape:
    """A tensor without its memory."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass
class _Reading:
    """A file that is being loaded.

    Attributes:
        file: Its path, or the open file.
        map_location: Where the job wants its tensors, as `torch.load` takes it.
        is_mapped: Whether it is mapped, so that what stays on the processor is no memory of torch's allocator.
        storages: Those made so far, by where they begin in the file: tensors may share one.
    """

    file: Any
    map_location: Any
    is_mapped: bool
    storages: dict[int, torch.Tensor]


class Files:
    """Stands in for `torch.save`, which would write values that nobody computed, and for `torch.load`.

    What is loaded before the first model is data and read as ever; from then on a file is asked for its shapes alone,
    and for small tensors of whole numbers, on which sizes may depend.
    """

    def __init__(
        self,
        count_left_out: Callable[[str], None],
        refuse: Callable[[str], NoReturn],
        is_begun: Callable[[], bool],
    ) -> None:
        """Remembers nothing yet.

        Args:
            count_left_out: Told of everything that was not written.
            refuse: Ends the job with a sentence: a file that it does not go on without is not there.
            is_begun: Tells whether the job has made its first model.
        """
        self._count_left_out = count_left_out
        self._refuse = refuse
        self._is_begun = is_begun
        self._load, self._save = torch.load, torch.save
        self._rebuild: Callable[..., torch.Tensor] = torch._utils._rebuild_tensor
        self._saved: dict[Any, Any] = {}
        self._reading: _Reading | None = None
        self._missing: tuple[BaseException, str] | None = None

    def install(self) -> None:
        """Takes the place of `torch.load`, and of what safetensors reads files with."""
        torch_module: Any = torch
        torch_module.load = self.load
        utils: Any = torch._utils
        utils._rebuild_tensor = self._rebuild_as_shape
        watch_safetensors(self.watched, self._is_begun)
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if self._missing is not None and self._missing[0] in _with_causes(error):
                self._refuse(self._missing[1])
            for cause in _with_causes(error):
                if isinstance(cause, FileNotFoundError) and self._is_left_out(cause.filename):
                    self._refuse(
                        f"The job reads the file {cause.filename}, which torch.save has not written: a dry run writes "
                        "no checkpoint. Leave out what the job does with the file, or guard it with os.path.exists."
                    )
            before(kind, error, trace)

        sys.excepthook = hook

    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Takes the place of `torch.save`."""
        if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):  # data, on its way into a pickle
            with unset_fake_temporarily():
                self._save(obj, f, *args, **kwargs)
            return
        self._count_left_out("torch.save wrote nothing")
        self._saved[_place(f)] = (f, _shapes(obj))  # the file object is kept: another must not get its number

    def _is_left_out(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and Path(path).resolve() in self._saved

    def load(self, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of `torch.load`."""
        if _place(f) in self._saved:
            return _tensors(self._saved[_place(f)][1], map_location)
        with self.watched(f):
            if active_fake_mode() is not None and str(map_location) != "meta":
                self._reading = _Reading(f, map_location, bool(kwargs.get("mmap")), {})
            try:
                return self._load(f, map_location, *args, **kwargs)
            finally:
                self._reading = None

    @contextmanager
    def watched(self, f: Any) -> Iterator[None]:
        """Remembers that a file is missing; where that ends the job, a sentence says so."""
        try:
            yield
        except FileNotFoundError as error:
            # Above this frame is that of contextlib, then the one that asked for the file.
            self._missing = (
                error,
                (
                    f"{line_of(sys._getframe(2))} loads {f}, which is not there. A dry run reads the shapes of a "
                    "checkpoint and none of its values: put one there whose tensors have the same names and shapes, or "
                    "start the job without it."
                ),
            )
            raise

    def _rebuild_as_shape(self, storage: Any, offset: int, size: Any, stride: Any) -> torch.Tensor:
        """Takes the place of what makes a tensor of a file's storage, which several tensors may share."""
        reading, untyped = self._reading, storage._untyped_storage
        begin = getattr(untyped, "_checkpoint_offset", None)
        if reading is None or begin is None:
            return self._rebuild(storage, offset, size, stride)
        whole = reading.storages.get(begin)
        if whole is None:
            device = _device_of(reading.map_location, getattr(untyped, "_fake_device", None))
            is_small = not storage.dtype.is_floating_point and untyped.nbytes() <= _MOST_DATA * storage.dtype.itemsize
            if device.type == "cpu" and (is_small or not self._is_begun()):
                whole = _read(reading, begin, untyped.nbytes(), storage.dtype)
            elif device.type == "cpu" and reading.is_mapped:
                whole = mapped((untyped.nbytes() // storage.dtype.itemsize,), (1,), storage.dtype)
            else:
                count = untyped.nbytes() // storage.dtype.itemsize
                whole = torch.empty((count,), dtype=storage.dtype, device=device)
            reading.storages[begin] = whole
        with nullcontext() if isinstance(whole, FakeTensor) else unset_fake_temporarily():
            tensor = torch.empty((0,), dtype=whole.dtype, device=whole.device)
            return tensor.set_(whole.untyped_storage(), offset, size, stride)


def _read(reading: _Reading, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Reads a storage from a checkpoint, as a tensor with data."""
    file = reading.file
    with Path(file).open("rb") if isinstance(file, (str, os.PathLike)) else nullcontext(file) as opened:
        place = opened.tell()
        opened.seek(begin)
        content = bytearray(opened.read(count))
        opened.seek(place)
    with unset_fake_temporarily():
        if not content:
            return torch.empty((0,), dtype=dtype)
        data = torch.frombuffer(content, dtype=dtype)
        return data if reading.is_mapped else data.clone()  # in memory of torch's allocator


def _device_of(map_location: Any, saved_on: Any) -> torch.device:
    """Returns where the job wants a storage, as `torch.load` reads its ``map_location``.

    Raises:
        RuntimeError: It was saved on a device that there is not, as in a real run.
    """
    location = str(saved_on or "cpu")
    if isinstance(map_location, dict):
        location = str(map_location.get(location, location))
    elif isinstance(map_location, (str, bytes, torch.device)):
        location = map_location.decode() if isinstance(map_location, bytes) else str(map_location)
    elif map_location is not None:
        with unset_fake_temporarily():
            moved = map_location(_storage(), location)
        location = location if moved is None else str(moved.device)
    if location.startswith("cuda") and not torch.cuda.is_available():
        serialization: Any = torch.serialization
        serialization.default_restore_location(_storage(), location)  # which says what to do
    return torch.device(location)


def _storage() -> torch.UntypedStorage:
    return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and those that it came of."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _place(file: Any) -> Any:
    if isinstance(file, (str, os.PathLike)):
        return Path(file).resolve()
    name = getattr(file, "name", None)  # an open file has its path there, or its descriptor where it has no path
    return Path(name).resolve() if isinstance(name, str) else id(file)


def _shapes(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return _Shape(value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, dict):
        return {key: _shapes(item) for key, item in value.items()}
    return type(value)(_shapes(item) for item in value) if type(value) in (list, tuple) else value


def _tensors(value: Any, map_location: Any) -> Any:
    if isinstance(value, _Shape):
        device = _device_of(map_location, value.device)
        return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=device)
    if isinstance(value, dict):
        return {key: _tensors(item, map_location) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_tensors(item, map_location) for item in value)
    again = copy.deepcopy(value)  # a file's content is another object with each load
    if isinstance(again, torch.nn.Module):
        moved: Any = again._apply
        moved(lambda tensor: tensor.to(_device_of(map_location, tensor.device)))
    return again
