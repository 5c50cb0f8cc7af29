"""The batches that DataLoaders yield, and their structure: tensors in tuples, lists, mappings, dataclasses."""

from __future__ import annotations

import ast
import dataclasses
from collections import Counter, UserDict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, dataloader

from memprof.recorder.calls.tracebacks import recompiled
from memprof.recorder.steps.loaders import MOST_BATCHES, LoaderObserver

_SEE, _LOADER, _ITERATOR = "__memprof_batch__", "__memprof_loader__", "__memprof_iterator__"
#: Batches inspected before the others are assumed to be alike.
_ENOUGH = 4
#: Entries of a container in a batch that are looked at for tensors.
_MOST_ENTRIES = 2_000
#: Sequence types that are not sequences of samples.
WHOLE = (str, bytes, torch.Size)
#: Types that can be inspected without running code of the job's.
_PLAIN = (str, bytes, int, float, bool, complex, torch.Size, torch.dtype, torch.device, type(None))


class BatchObserver:
    """Inspects the first batches yielded while gradients are recorded.

    Attributes:
        undivided: Why none of them can be split into micro-batches, a clause; "" if one can, or none was seen, or
            inspecting their types would run code of the job's.
    """

    def __init__(self, loaders: LoaderObserver) -> None:
        self.undivided = ""
        self.loaders = loaders
        self._left, self._seen = _ENOUGH, 0
        self._originals: list[tuple[FunctionType, CodeType]] = []

    def install(self) -> None:
        """Starts inspecting, as far as torch's functions are unmodified."""
        iterator: Any = dataloader._BaseDataLoaderIter
        for owner, method, rewrite, name, callback in (
            (iterator, "__next__", _see_results, _SEE, self._see),
            (iterator, "__init__", partial(_call_first, _ITERATOR, 2), _ITERATOR, self.loaders.note_iterator),
            (DataLoader, "__init__", partial(_call_first, _LOADER, 1), _LOADER, self.loaders.note_loader),
        ):
            function = vars(owner).get(method)
            if self.loaders.measures:
                function = getattr(function, "__wrapped__", function)  # a dry run stands around torch's own
            if not isinstance(function, FunctionType) or function.__closure__:
                continue  # replaced by a policy or the job
            try:
                code = recompiled(function, rewrite)
            except RuntimeError:
                continue  # another torch: the run will show what can be split
            function.__globals__[name] = callback
            self._originals.append((function, function.__code__))
            function.__code__ = code

    def remove(self) -> None:
        """Restores torch's own code."""
        for function, code in self._originals:
            function.__code__ = code
        self._originals.clear()

    def _see(self, iterator: Any, batch: Any) -> Any:
        """Returns a batch after inspecting it."""
        self._seen += 1
        try:
            with torch._C.DisableTorchFunction():
                self.loaders.see(iterator, _tensors_in(batch))
        except Exception:  # noqa: BLE001 - nor in here: what is not measured stays unknown
            self._seen = MOST_BATCHES
        if self._left > 0 and torch.is_grad_enabled():
            self._left -= 1
            try:
                self.undivided = _why_whole(batch, _expected_size(iterator))
            except Exception:  # noqa: BLE001 - nothing in here may reach the job: whether it can be split stays unknown
                self.undivided = ""
            self._left *= bool(self.undivided)
        if not self._left and self._seen >= MOST_BATCHES:
            self.remove()
        return batch


def _see_results(definition: ast.FunctionDef) -> None:
    for node in ast.walk(definition):
        if isinstance(node, ast.Return) and node.value is not None:
            names = [ast.copy_location(ast.Name(name, ast.Load()), node.value) for name in (_SEE, "self")]
            call = ast.Call(names[0], [names[1], node.value], [])
            node.value = ast.copy_location(call, node.value)


def _call_first(name: str, count: int, definition: ast.FunctionDef) -> None:
    """Has a function first call another one with some of its own arguments, the first ones."""
    names = ", ".join(each.arg for each in definition.args.args[:count])
    call = ast.parse(f"{name}({names})").body[0]
    for node in ast.walk(call):
        ast.copy_location(node, definition.body[0])
    definition.body.insert(0, call)


def _expected_size(iterator: Any) -> int | None:
    """Returns a loader's batch size, None if a sampler of the job's own makes batches."""
    sampler = vars(iterator).get("_index_sampler")
    size = sampler.batch_size if type(sampler) is torch.utils.data.BatchSampler else None
    return size if isinstance(size, int) else None


def _why_whole(batch: Any, expected: int | None) -> str:
    """Returns why a batch cannot be split; "" if it can, or this is unknown."""
    with torch._C.DisableTorchFunction():
        if not is_plain(batch):
            return ""
        if type(batch) is list and batch and all(type(each) is dict for each in batch) and first_tensor(batch) is None:
            # Prompts, mostly, several times each: a loop that rewards completions compares those of a prompt.
            return "a DataLoader yields a list of records without tensors, which the loop may compare with one another"
        if batch_size(batch, expected) is not None:
            return ""
    held = f", and no tensor in it has the {expected} samples of the loader" if expected is not None else ""
    return f"a DataLoader yields a {type(batch).__name__}{held}"


def is_record(value: Any) -> bool:
    """Whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass instance that have been set."""
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if hasattr(value, each.name)}


def is_graphs(value: Any) -> bool:
    """Whether a value is a batch of graphs as built by torch_geometric: one graph of parts without common edges."""
    kind = type(value)  # an instance attribute might be computed
    return all(hasattr(kind, name) for name in ("num_graphs", "to_data_list", "from_data_list"))


def entries_of(value: Any) -> Iterable[Any]:
    """Returns the entries of a container of tensors; nothing for any other value."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    if is_record(value):
        return fields_of(value).values()
    return value.to_dict().values() if is_graphs(value) else ()


def first_tensor(value: Any) -> torch.Tensor | None:
    """Returns a tensor that identifies a batch: a list or tuple itself cannot be weakly referenced."""
    if isinstance(value, torch.Tensor):
        return value
    return next((found for entry in entries_of(value) if (found := first_tensor(entry)) is not None), None)


def _tensors_in(batch: Any) -> list[torch.Tensor]:
    """Returns the tensors with data in a batch, one of each storage."""
    found: dict[int, torch.Tensor] = {}
    waiting = [batch]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and not value.is_nested:
                found.setdefault(value.untyped_storage()._cdata, value)
        else:
            waiting.extend(islice(entries_of(value), _MOST_ENTRIES))
    return list(found.values())


def batch_size(batch: Any, expected_size: int | None = None) -> int | None:
    """Returns the number of samples in a batch, None if undetermined.

    It is the first size of the tensors, or of most of them if they differ. If the loader's batch size is known, a
    list of that many samples that cannot be stacked (images of any size) is also a batch, and anything larger than
    expected is not.
    """
    if is_graphs(batch):
        return int(batch.num_graphs)
    tensors: list[torch.Tensor] = []
    lengths: list[int] = []
    if not collect(batch, tensors, lengths):
        return None
    first = Counter(tensor.shape[0] for tensor in tensors)
    if expected_size is not None and expected_size in first:
        return expected_size
    if expected_size is not None and expected_size in lengths:
        return expected_size
    if not first:
        return None
    size = first.most_common(1)[0][0]
    return size if size > 0 and (expected_size is None or size <= expected_size) else None


def collect(value: Any, tensors: list[torch.Tensor], lengths: list[int]) -> bool:
    """Collects the tensors and the sequence lengths in a batch; returns False if part of it cannot be split."""
    if isinstance(value, PackedSequence):
        return False  # its samples are interleaved
    if is_graphs(value):
        lengths.append(value.num_graphs)
        return True
    if isinstance(value, torch.Tensor):
        if value.dim():
            tensors.append(value)
        return True
    if isinstance(value, Mapping):
        return all(collect(each, tensors, lengths) for each in value.values())
    if isinstance(value, (list, tuple)) and not isinstance(value, WHOLE):
        lengths.append(len(value))
        return all(collect(each, tensors, lengths) for each in value)
    if is_record(value):
        return all(collect(each, tensors, lengths) for each in fields_of(value).values())
    return True


def is_plain(value: Any) -> bool:
    """Whether a batch consists of types that can be inspected without running code of the job's."""
    if isinstance(value, UserDict):
        return is_plain(value.data)
    if type(value) is dict:
        return all(is_plain(each) for each in value.values())
    if is_graphs(value):
        return True
    if isinstance(value, PackedSequence) or type(value) in (torch.Tensor, torch.nn.Parameter) or type(value) in _PLAIN:
        return True
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(type(value), "_fields")):
        return all(is_plain(each) for each in value)
    return is_record(value) and all(is_plain(each) for each in fields_of(value).values())
