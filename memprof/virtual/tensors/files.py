"""Checkpoints in a dry run: the job's own and those on disk are loaded as shapes."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from memprof.virtual.tensors.fakes import mapped
from memprof.virtual.tensors.tensor_files import watch_safetensors
from memprof.virtual.values.answers import line_of

#: Maximum number of integers read as data: positions, lengths and counts, on which sizes may depend.
_MOST_DATA = 2**16


@dataclass(frozen=True)
class _Shape:
    """The shape, type and device of a saved tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass
class _Reading:
    """A file being loaded.

    Attributes:
        file: Its path, or the open file.
        map_location: Target device of its tensors, as in `torch.load`.
        is_mapped: Whether it is mapped, so that tensors on the processor use no memory of torch's allocator.
        storages: Storages created so far by their offset in the file: tensors may share one.
    """

    file: Any
    map_location: Any
    is_mapped: bool
    storages: dict[int, torch.Tensor]


class Files:
    """Replaces `torch.save`, which would write values that were not computed, and `torch.load`.

    Files loaded before the first model are data and read normally; afterwards only their shapes are read, plus small
    tensors of integers, on which sizes may depend.
    """

    def __init__(
        self,
        count_left_out: Callable[[str], None],
        refuse: Callable[[str], NoReturn],
        is_begun: Callable[[], bool],
    ) -> None:
        """Starts with no file saved.

        Args:
            count_left_out: Called for each file not written.
            refuse: Ends the job with a message: a required file is missing.
            is_begun: Returns whether the job has created its first model.
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
        """Replaces `torch.load`, safetensors' file reader, and what moves or deletes a checkpoint."""
        torch_module: Any = torch
        torch_module.load = self.load
        for name in ("rename", "replace"):
            setattr(os, name, partial(self._move, getattr(os, name)))
        for name in ("remove", "unlink"):
            setattr(os, name, partial(self._delete, getattr(os, name)))
        for module, name in ((os, "link"), (shutil, "copy"), (shutil, "copy2"), (shutil, "copyfile")):
            setattr(module, name, partial(self._copy, getattr(module, name)))
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
                        "no checkpoint. Skip that part of the job, or guard it with os.path.exists."
                    )
            before(kind, error, trace)

        sys.excepthook = hook

    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Replaces `torch.save`."""
        if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):  # data, being pickled
            with unset_fake_temporarily():
                self._save(obj, f, *args, **kwargs)
            return
        self._count_left_out("torch.save wrote nothing")
        self._saved[_place(f)] = (f, _shapes(obj))  # keeps the file object alive: its id must stay unique

    def _move(self, before: Callable[..., None], src: Any, dst: Any, **kwargs: Any) -> None:
        """Replaces `os.rename` and `os.replace`, with which jobs put a complete checkpoint in the place of the last."""
        if self._is_left_out(src):
            self._saved[_place(dst)] = self._saved.pop(_place(src))
            return
        before(src, dst, **kwargs)
        if self._is_left_out(dst):
            del self._saved[_place(dst)]

    def _delete(self, before: Callable[..., None], path: Any, **kwargs: Any) -> None:
        """Replaces `os.remove` and `os.unlink`, with which jobs delete older checkpoints."""
        if self._is_left_out(path):
            del self._saved[_place(path)]
        else:
            before(path, **kwargs)

    def _copy(self, before: Callable[..., Any], src: Any, dst: Any, **kwargs: Any) -> Any:
        """Replaces `os.link` and copies by `shutil`, with which jobs keep a checkpoint by another name."""
        if not self._is_left_out(src):
            return before(src, dst, **kwargs)
        dst = Path(dst) / Path(src).name if Path(dst).is_dir() else dst
        self._saved[_place(dst)] = self._saved[_place(src)]
        return dst

    def _is_left_out(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and Path(path).resolve() in self._saved

    def load(self, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Replaces `torch.load`."""
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
        """Notes a missing file; if that ends the job, a message explains it."""
        try:
            yield
        except FileNotFoundError as error:
            # The frame above is contextlib's, the next one requested the file.
            self._missing = (
                error,
                (
                    f"{line_of(sys._getframe(2))} loads {f}, which does not exist. A dry run reads only the shapes "
                    "of a checkpoint: create one whose tensors have the same names and shapes, or start the job "
                    "without it."
                ),
            )
            raise

    def _rebuild_as_shape(self, storage: Any, offset: int, size: Any, stride: Any) -> torch.Tensor:
        """Replaces the function that builds a tensor from a file's storage, which several tensors may share."""
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
    """Reads a storage from a checkpoint as a tensor with data."""
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
        return data if reading.is_mapped else data.clone()  # allocated by torch's allocator


def _device_of(map_location: Any, saved_on: Any) -> torch.device:
    """Returns the target device of a storage, according to the ``map_location`` of `torch.load`.

    Raises:
        RuntimeError: It was saved on a missing device, as in a real run.
    """
    location = str(saved_on or "cpu")
    if isinstance(map_location, dict):
        location = str(map_location.get(location, location))
    elif isinstance(map_location, (str, bytes, torch.device)):
        location = map_location.decode() if isinstance(map_location, bytes) else str(map_location)
    elif map_location is not None:
        with unset_fake_temporarily():
            moved = map_location(_Moved(), location)
        location = location if moved is None else str(moved.device)
    if location.startswith("cuda") and not torch.cuda.is_available():
        serialization: Any = torch.serialization
        serialization.default_restore_location(_storage(), location)  # raises with torch's advice
    return torch.device(location)


class _Moved:
    """A storage of a file, as a function of the job's is given it to say where it goes.

    Attributes:
        device: Where it is.
    """

    def __init__(self, device: Any = "cpu") -> None:
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            _storage().cuda()  # raises torch's error
        self.device = torch.device(device)

    def cuda(self, device: Any = None, **_: Any) -> _Moved:
        return _Moved(f"cuda:{device}" if isinstance(device, int) else device or "cuda")

    def cpu(self) -> _Moved:
        return _Moved()

    def to(self, device: Any, **_: Any) -> _Moved:
        return _Moved(device)

    def nbytes(self) -> int:
        return 0


def _storage() -> torch.UntypedStorage:
    return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _place(file: Any) -> Any:
    if isinstance(file, (str, os.PathLike)):
        return Path(file).resolve()
    name = getattr(file, "name", None)  # an open file's path, or its descriptor if it has no path
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
    again = copy.deepcopy(value)  # each load returns new objects
    if isinstance(again, torch.nn.Module):
        moved: Any = again._apply
        moved(lambda tensor: tensor.to(_device_of(map_location, tensor.device)))
    return again
