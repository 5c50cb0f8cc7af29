"""States which tensors Python holds more of than before, and through which variables, to explain memory that stays."""

from __future__ import annotations

import gc
import math
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from memprof.recorder.calls.torch_state import untraced
from memprof.recorder.clock import clock_ns
from memprof.recorder.log import RawLog
from memprof.recorder.memory.holders import Holder, find_holders
from memprof.recorder.memory.inventory import is_computed
from memprof.recorder.memory.live_objects import arrays_held, entries_bytes, largest_containers, live_objects
from memprof.recorder.memory.references import graph_holders, graphs_over_steps
from memprof.recorder.memory.tensor_memory import gradient_of, is_elsewhere, storage_span
from memprof.trace.files.spool import ARRAY, OBJECTS

#: Tensors that are followed, of all kinds together and of one, those of the kinds of most bytes first.
_MOST_TENSORS, _MOST_OF_A_KIND = 240, 96
#: The same in a recording of a whole run, where one tensor of each known line is followed too.
_MOST_IN_RUN, _MOST_OF_A_KIND_IN_RUN = 12, 2
#: Growth shows in this many recorded steps; with fewer, there is nothing to explain.
LEAST_STEPS = 3
#: A kind is followed if there are this many more than at the count before: one more is what a step leaves behind.
_LEAST_GROWTH = 2
#: In a recording of a whole run, statements take at most this share of the thread's processor time, and these seconds
#: of it so that short runs have some too, and begin in this step.
_SHARE_OF_RUN, _ALLOWANCE_S = 0.0025, 0.5
#: Processor time that every such statement has for following references.
_LEAST_S = 0.4
_FIRST_STEP = 4
#: Steps until the second statement, and at least between the others: tensors made in two steps have two to go.
_SOON, _APART = 2, 5
#: Where no time is left, this share of the steps so far passes until the next look: one in so many.
_RETRY = 64

#: Tensors of shapes of their own that are followed where bytes have grown.
_MOST_REPLACED = 4
#: Tensors whose graphs are searched, the oldest and the latest of each kind.
_MOST_GRAPHS = 20
#: The latest of each kind, outside recordings of a whole run.
_MOST_ROOTS_OF_A_KIND = 6
#: Tensors that training does not keep are looked up from this share of all bytes on, at most so many.
_WORTH, _MOST_IDLE = 1 / 25, 480
#: Objects that are followed from the data sets of the job's loaders.
_MOST_OF_DATA = 20_000
#: A container is followed from so many elements more on.
_LEAST_ELEMENTS = 300
_NO_HOLDER = Holder("unknown", "", "", None)
_OF_CODE = (type, types.ModuleType, types.FunctionType, types.FrameType, str, int, float)
_sequence_number = torch._C._autograd._get_sequence_nr

#: Shape, element type and device of a tensor, or of an array of numpy, and whether it has an autograd graph.
Kind = tuple[str, str, str, bool]
#: Bytes of a tensor's storage, and its element type.
Size = tuple[int, torch.dtype]
#: Stack and operator that made a tensor.
Line = tuple[str, int]
#: Returns address and bytes of a tensor's storage; address 0 for one without.
Span = Callable[[torch.Tensor], tuple[int, int]]


class Survivor(NamedTuple):
    """Storages that one line has made in one step, and that are still alive many steps later.

    Attributes:
        made_step: The step.
        op: Number of the operator's name.
        module: Number of the module that ran, -1 outside any.
        frames: The Python stack, one frame a line, innermost first.
        shape: Shape of the largest tensor.
        dtype: Its element type, such as float32.
        device: Its device.
        spans: Address and bytes of each storage.
        nodes: Sequence numbers of the autograd nodes of the operators.
    """

    made_step: int
    op: int
    module: int
    frames: str
    shape: str
    dtype: str
    device: str
    spans: list[tuple[int, int]]
    nodes: frozenset[int]

    @property
    def line(self) -> Line:
        """What storages of one line have in common: stack and operator."""
        return self.frames, self.op


class KeptTensors:
    """Counts the tensors that Python holds, by kind, and writes what holds those that have become more.

    Attributes:
        grown: Sizes of the tensors of which the last statement found more than the one before.
    """

    def __init__(self, log: RawLog, span: Span, *, is_whole_run: bool = False, has_addresses: bool = True) -> None:
        """Begins without a count.

        Args:
            log: Destination of the statements.
            span: Returns address and bytes of a tensor's storage.
            is_whole_run: Statements are written over a whole run, in little time.
            has_addresses: A statement's addresses are those of storages that are recorded then.
        """
        self._log = log
        self._span: Callable[[Any], tuple[int, int]] = lambda one: (
            span(one) if isinstance(one, torch.Tensor) else (0, one.nbytes)
        )
        self._is_whole_run, self._has_addresses = is_whole_run, has_addresses
        self.grown: frozenset[Size] = frozenset()
        self._first: dict[Kind, int] | None = None  # as many as there were at the first count
        self._counts: dict[Kind, int] = {}
        self._bytes = 0  # of all tensors, at the first count
        self._lengths: dict[int, int] = {}  # of the largest containers, by identity, at the first count
        self._host_bytes = 0  # of all tensors in main memory and of arrays, at the latest count
        self._began = time.thread_time()
        self._spent = 0.0
        self._next_step = self._next_count = _FIRST_STEP
        self._counted_at = self._step_began_at = 0  # autograd's counter at the first count, and as the last step began

    @property
    def has_counted(self) -> bool:
        """Whether tensors have been counted: only then can a statement tell which became more."""
        return self._first is not None

    def count(self) -> None:
        """Counts the tensors that there are, for the next statement to compare with."""
        with torch._C.DisableTorchFunction(), untraced():
            kinds = self._by_kind()
            self._first = self._counts = {kind: len(alike) for kind, alike in kinds.items()}
            self._bytes = self._sum(kinds)
            self._lengths = self._measured()
        self._counted_at = self._step_began_at = _sequence_number()

    def begin_step(self) -> None:
        """Notes where the nodes of a recorded step begin, the last but for the statement's own step."""
        self._step_began_at = _sequence_number()

    def is_due(self, step: int) -> bool:
        """Whether another statement is due, ever more rarely; without time for one, all are counted alone, as often."""
        if step < self._next_step:
            return False
        has_time = self._seconds_left() >= 0
        if not has_time and step >= self._next_count:
            self._next_count = step + max(_APART, step // 2)
            began = time.thread_time()
            with torch._C.DisableTorchFunction(), untraced():
                self._by_kind()
            self._log.sample_heap(self._host_bytes)
            self._spent += time.thread_time() - began
        self._next_step = step + (0 if has_time else step // _RETRY)  # reading the thread's clock takes time, too
        return has_time

    def state(self, step: int, survivors: Sequence[Survivor] = ()) -> bool:
        """Counts, and writes what holds the tensors of which there are more than at the first count.

        Args:
            step: The step that has just ended.
            survivors: Storages whose lines are known, which are written too.

        Returns:
            Whether there are more tensors of any kind than at the count before, or survivors.
        """
        began = time.thread_time()
        self._next_step = self._next_count = step + max(_APART if self.has_counted else _SOON, step // 2)
        with torch._C.DisableTorchFunction(), untraced():
            records = self._records(step, survivors)
        if records:
            self._log.record("holders", records)
        if self._is_whole_run:
            self._log.sample_heap(self._host_bytes)
        self._spent += time.thread_time() - began
        return bool(self.grown or survivors)

    def state_idle(self, step: int, trained: list[torch.Tensor]) -> None:
        """Writes what holds the tensors that training does not keep, such as a loaded checkpoint, if they are large.

        Data sets are left out: workers read them in processes of their own, where nothing is recorded.

        Args:
            step: The step that has just ended.
            trained: Parameters, gradients, buffers and state of the models in training and of their optimizers.
        """
        tensors = live_objects(torch.Tensor)
        leaves = [tensor for tensor in tensors if not is_computed(tensor) and not tensor.is_nested]
        gradients = _gradients_among(tensors, leaves)
        busy = {self._span(tensor)[0] for tensor in (*trained, *gradients, *tensors_of_data())}
        idle: dict[int, tuple[int, torch.Tensor]] = {}
        for tensor in leaves:
            address, size = self._span(tensor)
            if address and address not in busy:
                idle.setdefault(address, (size, tensor))
        total = sum(size for _, size in {self._span(tensor) for tensor in tensors})
        if sum(size for size, _ in idle.values()) < _WORTH * total:
            return
        largest = sorted(idle.items(), key=lambda one: -one[1][0])[:_MOST_IDLE]
        followed = [tensor for _, (_, tensor) in largest]
        ours = (
            tensors,
            leaves,
            gradients,
            trained,
            idle,
            *idle.values(),
            largest,
            *largest,
            *(one[1] for one in largest),
        )
        held = find_holders(followed, ignored=[*ours, ours])
        common = {"step": step, "time_ns": clock_ns(), "tensors": 0}
        records = [
            {**common, "address": address, "bytes": size, **_described(_kind_of(tensor), one)}
            for (address, (size, tensor)), one in zip(largest, held, strict=True)
            if one.chain
        ]
        if records:
            self._log.record("holders", records)

    def _seconds_left(self) -> float:
        """Returns the time that statements over a whole run may still take."""
        return _ALLOWANCE_S + _SHARE_OF_RUN * (time.thread_time() - self._began) - self._spent

    def _records(self, step: int, survivors: Sequence[Survivor]) -> list[dict[str, Any]]:
        views: dict[int, torch.Tensor] = {}
        kinds, earliest, before = self._by_kind(views), self._first, self._counts
        self._counts = {kind: len(alike) for kind, alike in kinds.items()}
        common = {"step": step, "time_ns": clock_ns()}
        # Of storages that are not recorded, the sum tells whether growth went on.
        total = {"address": 0, "tensors": sum(self._counts.values()), "bytes": self._sum(kinds)}
        totals = [] if self._has_addresses else [{**common, **total, **_described(("", "", "", False), _NO_HOLDER)}]
        if earliest is None:
            self._first, self._lengths = self._counts, self._measured()
            return totals
        grown = [kind for kind, alike in kinds.items() if len(alike) - earliest.get(kind, 0) >= _LEAST_GROWTH]
        self.grown = frozenset(
            (self._span(kinds[kind][-1])[1], kinds[kind][-1].dtype)
            for kind in grown
            if self._counts[kind] > before.get(kind, 0) and isinstance(kinds[kind][-1], torch.Tensor)
        )
        sizes = {kind: sum(self._span(tensor)[1] for tensor in kinds[kind]) for kind in grown}
        most_tensors, most_of_a_kind = _MOST_TENSORS, _MOST_OF_A_KIND
        if self._is_whole_run:
            most_tensors, most_of_a_kind = _MOST_IN_RUN, _MOST_OF_A_KIND_IN_RUN
        chosen: list[tuple[Kind, torch.Tensor]] = []
        for kind in sorted(grown, key=lambda one: -sizes[one]):
            # Those in the middle: a step's tensors lie beside each other, and the latest may be the current step's.
            most = min(most_of_a_kind, most_tensors - len(chosen))
            first = max(0, (len(kinds[kind]) - most) // 2)
            chosen += [(kind, tensor) for tensor in kinds[kind][first : first + most]]
        if not self._is_whole_run and self._sum(kinds) > self._bytes:
            chosen += self._replaced(kinds, earliest)
            sizes |= {kind: self._span(tensor)[1] for kind, tensor in chosen if kind not in sizes}
        examples = self._examples(kinds, survivors)
        # A view holds its base in C++: of a base that nothing in Python refers to, the holder is its view's.
        tensors = [tensor for _, tensor in [*chosen, *examples.values()]]
        seen_as = [views.get(self._span(tensor)[0], tensor) for tensor in tensors]
        graphs: list[tuple[list[int], torch.Tensor]] = []
        if self._is_whole_run:
            computed = [one for kind, alike in kinds.items() if kind[3] for one in (alike[0], alike[-1])]
        else:
            computed = [one for kind, alike in kinds.items() if kind[3] for one in alike[-_MOST_ROOTS_OF_A_KIND:]]
            graphs = graphs_over_steps(_smallest(computed), self._counted_at, self._step_began_at)
        kinds.clear()
        container = self._grown_container()
        if not chosen and not survivors and not graphs and not container:
            return totals
        limit = max(_LEAST_S, self._seconds_left()) if self._is_whole_run else math.inf
        roots = [root for _, root in graphs]
        ours = (
            chosen,
            *chosen,
            examples,
            *examples.values(),
            graphs,
            *graphs,
            roots,
            computed,
            views,
            tensors,
            seen_as,
            container,
        )
        followed = [*tensors, *roots, *seen_as, *container]
        held = find_holders(followed, seconds=limit, ignored=[*ours, ours])
        for place, other in enumerate(held[len(tensors) + len(roots) : len(held) - len(container)]):
            held[place] = held[place] if held[place].chain else other
        records: list[dict[str, Any]] = totals + [
            {
                **common,
                "address": self._span(tensor)[0] if self._has_addresses else 0,
                "tensors": self._counts[kind],
                "bytes": sizes[kind],
                **_described(kind, one),
            }
            for (kind, tensor), one in zip(chosen, held[: len(chosen)], strict=True)
        ]
        if container and held[-1].chain:
            objects = {"address": 0, "tensors": len(container[0]), "bytes": entries_bytes(container[0])}
            records.append({**common, **objects, **_described(("", OBJECTS, "cpu", False), held[-1])})
        written: set[int] = set()
        for (nodes, root), one in zip(graphs, held[len(chosen) + len(examples) :], strict=False):
            added = [number for number in nodes if number not in written] if one.chain else []
            written.update(added)
            if added:  # a node of several graphs belongs to the first
                records.append(
                    {
                        **common,
                        "address": 0,
                        "tensors": 0,
                        "bytes": 0,
                        "nodes": added,
                        **_described(("", "", str(root.device), True), one),
                    }
                )
        holders = dict(zip(examples, held[len(chosen) : len(chosen) + len(examples)], strict=True))
        by_graph = _held_by_graphs([one for one in survivors if not _chain(holders, one)], computed, limit)
        for survivor in survivors:
            has_graph = survivor.line in examples and examples[survivor.line][0][3]
            kind = (survivor.shape, f"torch.{survivor.dtype}", survivor.device, has_graph)
            records.append(
                {
                    **common,
                    "address": survivor.spans[0][0],
                    "tensors": len(survivor.spans),
                    "bytes": sum(size for _, size in survivor.spans),
                    "made_step": survivor.made_step,
                    "op": survivor.op,
                    "module": survivor.module,
                    "made_at": survivor.frames,
                    "is_by_graph": survivor.line in by_graph,
                    **_described(kind, (holders | by_graph).get(survivor.line, _NO_HOLDER)),
                }
            )
        return records

    def _measured(self) -> dict[int, int]:
        return {id(one): len(one) for one in largest_containers()} if self._is_whole_run else {}

    def _grown_container(self) -> list[Any]:
        """Returns the container that has got most elements since the first count, none where that are few."""
        found, grown = largest_containers() if self._is_whole_run else [], _LEAST_ELEMENTS
        chosen: list[Any] = []
        for one in found:
            more = len(one) - self._lengths.get(id(one), 0)
            if more >= grown and one is not self._lengths:
                chosen, grown = [one], more
        found.clear()
        return chosen

    def _sum(self, kinds: dict[Kind, list[torch.Tensor]]) -> int:
        return sum(self._span(tensor)[1] for alike in kinds.values() for tensor in alike)

    def _replaced(
        self, kinds: dict[Kind, list[torch.Tensor]], before: dict[Kind, int]
    ) -> list[tuple[Kind, torch.Tensor]]:
        """Returns the largest tensors of a shape that none had before: one that each step joins anew has its own."""
        new = [(kind, alike[0]) for kind, alike in kinds.items() if kind not in before and len(alike) == 1]
        new = [one for one in new if not one[0][3]]
        return sorted(new, key=lambda one: -self._span(one[1])[1])[:_MOST_REPLACED]

    def _examples(
        self, kinds: dict[Kind, list[torch.Tensor]], survivors: Sequence[Survivor]
    ) -> dict[Line, tuple[Kind, torch.Tensor]]:
        """Returns a tensor of each line's survivors; none for lines whose tensors Python does not hold."""
        wanted = {address: one.line for one in survivors for address, _ in one.spans}
        found: dict[Line, tuple[Kind, torch.Tensor]] = {}
        for kind, alike in kinds.items() if wanted else ():
            for tensor in alike:
                line = wanted.get(self._span(tensor)[0])
                if line is not None:
                    found.setdefault(line, (kind, tensor))
        return found

    def _by_kind(self, views: dict[int, torch.Tensor] | None = None) -> dict[Kind, list[torch.Tensor]]:
        """Returns the tensors that Python holds, oldest first; not parameters and their gradients, nor views.

        Args:
            views: Filled with the latest view of each storage, by its address.
        """
        tensors = live_objects(torch.Tensor)
        leaves = [tensor for tensor in tensors if not is_computed(tensor) and tensor.requires_grad]
        gradients = set(map(id, _gradients_among(tensors, leaves)))
        kinds: dict[Kind, list[torch.Tensor]] = {}
        seen: set[int] = set()
        spans = {storage_span(tensor) for tensor in tensors if tensor.is_cpu and not tensor.is_nested}
        self._host_bytes = sum(size for _, size in spans)
        for tensor in tensors:
            if isinstance(tensor, torch.nn.Parameter) or id(tensor) in gradients or tensor.is_nested:
                continue
            address, size = self._span(tensor)
            if address in seen and views is not None:
                views[address] = tensor
            if address and size and address not in seen:
                seen.add(address)
                kinds.setdefault(_kind_of(tensor), []).append(tensor)
        arrays: dict[Any, list[Any]] = {}
        for array in arrays_held() if self._is_whole_run else ():
            self._host_bytes += array.nbytes
            arrays.setdefault((array.shape, array.dtype), []).append(array)
        for alike in arrays.values():
            kinds.setdefault(_kind_of(alike[0]), []).extend(alike)
        return kinds


def _gradients_among(tensors: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the gradients of leaves; for parameters of other threads, whatever tensors look like theirs."""
    found = [gradient for leaf in leaves if (gradient := gradient_of(leaf)) is not None]
    alike = {(leaf.shape, leaf.dtype) for leaf in leaves if is_elsewhere(leaf)}
    return found + [one for one in tensors if alike and not one.is_nested and (one.shape, one.dtype) in alike]


def _kind_of(tensor: Any) -> Kind:
    if not isinstance(tensor, torch.Tensor):
        return "x".join(map(str, tensor.shape)), f"{ARRAY}{tensor.dtype}", "cpu", False
    shape = "x".join(str(int(length)) for length in tensor.shape)
    return shape, str(tensor.dtype), str(tensor.device), is_computed(tensor)


def tensors_of_data() -> list[torch.Tensor]:
    """Returns the tensors that the data sets of the job's loaders refer to."""
    found = reachable([loader.dataset for loader in live_objects(torch.utils.data.DataLoader)])
    return [one for one in found if issubclass(type(one), torch.Tensor)]


def reachable(objects: list[Any]) -> list[Any]:
    """Returns some objects and what they refer to, nearest first, without code, running none, and only so many."""
    seen = {id(one): one for one in objects}
    for one in objects:
        if len(seen) > _MOST_OF_DATA:
            break
        for child in gc.get_referents(one):
            if id(child) not in seen and not issubclass(type(child), _OF_CODE):
                seen[id(child)] = child
                objects.append(child)
    return list(seen.values())


def _chain(holders: dict[Line, Holder], survivor: Survivor) -> str:
    return holders.get(survivor.line, _NO_HOLDER).chain


def _held_by_graphs(survivors: Sequence[Survivor], computed: list[torch.Tensor], seconds: float) -> dict[Line, Holder]:
    """Returns what holds the autograd graphs that hold the survivors of each line.

    Args:
        survivors: Those without a holder of their own.
        computed: Tensors with a graph.
        seconds: Processor time for following references.
    """
    lines: dict[Line, frozenset[int]] = {}
    for survivor in survivors:
        lines[survivor.line] = lines.get(survivor.line, frozenset()) | survivor.nodes
    # The smallest first: a loss is what a job keeps by mistake.
    found = graph_holders(lines, _smallest(computed) if lines else [])
    held = find_holders(list(found.values()), seconds=seconds) if found else []
    return {line: one for line, one in zip(found, held, strict=True) if one.chain}


def _smallest(computed: list[torch.Tensor]) -> list[torch.Tensor]:
    return sorted(computed, key=torch.Tensor.numel)[:_MOST_GRAPHS]


def _described(kind: Kind, held: Holder) -> dict[str, Any]:
    variable = held.variable
    return {
        "shape": kind[0],
        "dtype": kind[1].removeprefix("torch."),
        "device": kind[2],
        "has_graph": kind[3],
        "kind": held.kind,
        "chain": held.chain,
        "container": held.container,
        "frame": "" if variable is None else variable.place,
    }
