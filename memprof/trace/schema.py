"""Every table of a trace: its columns, with their types, units and meaning, defined in one place.

A table is a frozen dataclass of equally long numpy columns, so a column is named only here, and other
files access it as a type-checked attribute (``step.ops.phase``).

Rules that hold for all tables:

* ``*_id`` columns are ids; a missing id ("not freed", "no module") is ``NONE`` (-1) in
  memory and null in the file.
* Order is ``op_id``, never time: clocks tie.
* The unit is in the name: ``_bytes`` are int64, ``_us`` are float64 microseconds (Unix time for points in time).
* Enumerations are stored as strings; a missing text is ``""`` in memory and null in the file.

``docs/trace-format.md`` is generated from this file (``python -m memprof.trace.schema``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from memprof.phases import PHASES, TRAINING
from memprof.version import SCHEMA_VERSION as SCHEMA_VERSION  # noqa: PLC0414 - beside the tables

if TYPE_CHECKING:
    import numpy.typing as npt

#: A missing id.
NONE = -1

#: Largest request that a trace holds, 1 EiB; larger ones, with which scripts probe memory, are cut to it.
MOST_REQUESTED_BYTES = 2**60

# Equivalent to numpy.typing.NDArray, which the recorder does not import into the job.
Ints = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Bools = np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]
Texts = np.ndarray[tuple[Any, ...], np.dtype[np.object_]]

#: Categories of memory, and what each is called.
CATEGORY_LABELS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "input": "inputs",
    "activation": "activations",
    "temporary": "temporaries",
    "workspace": "kernel workspace",
    "collective": "communication buffers",
    "unknown": "uncategorized",
}
CATEGORIES = tuple(CATEGORY_LABELS)
CATEGORY_SOURCES = ("stack", "phases", "size", "profiler")
KINDS = ("compute", "copy", "collective", "allocation")
ROLES = ("read", "write", "mutate")
HOST_LIMITS = ("control group", "machine", "/dev/shm")
#: What takes host memory. Workers are forked or started by other methods; of a data set, Python's objects count apart
#: from the arrays, tensors and texts that workers by fork share, and from files that are mapped.
NEED_KINDS = ("forked", "started", "objects", "arrays", "mapped", "batch", "pinned batch", "pinned")
HOLDER_KINDS = ("global", "local", "class", "closure", "exception", "cache", "ring", "optimizer", "cycle", "unknown")
STEP_KINDS = ("warm_up", "recorded", "timed", "plain", "skipped")
PEAK_SOURCES = ("counted", "heard", "told")
ACTIONS = (
    "alloc",
    "free",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
    "annotate",
)


#: Name of the two operator rows that represent a gap: the first frees everything alive, the second recreates it.
NOT_RECORDED = "(not recorded)"
#: Name of storages that no event of their own allocated.
ELSEWHERE = "taken by another thread, or held by no Python object"


@dataclass(frozen=True)
class Column:
    """The definition of one column.

    Attributes:
        name: The column's name.
        kind: ``id``, ``int``, ``float``, ``bool`` or ``text``.
        meaning: One sentence for the format reference.
        values: The allowed strings of an enumeration, else empty.
        is_open: Phase names defined by the job are also allowed.
    """

    name: str
    kind: str
    meaning: str
    values: tuple[str, ...] = ()
    is_open: bool = False

    @property
    def dtype(self) -> npt.DTypeLike:
        """The numpy dtype of the column in memory."""
        return {"id": np.int64, "int": np.int64, "float": np.float64, "bool": np.bool_, "text": np.object_}[self.kind]

    @property
    def missing(self) -> Any:
        """The in-memory value that represents null, or None where the column has none."""
        return {"id": NONE, "text": "", "float": np.nan}.get(self.kind)


def read_shape(text: str) -> tuple[int, ...]:
    """Returns the dimensions that a column ``shape`` spells, such as ``16x128``; none for a scalar."""
    return tuple(map(int, text.split("x"))) if text else ()


def _column(kind: str, meaning: str, values: tuple[str, ...] = (), *, is_open: bool = False) -> Any:
    return field(metadata={"kind": kind, "meaning": meaning, "values": values, "is_open": is_open})


def _id(meaning: str) -> Any:
    return _column("id", meaning)


def _int(meaning: str) -> Any:
    return _column("int", meaning)


def _float(meaning: str) -> Any:
    return _column("float", meaning)


def _bool(meaning: str) -> Any:
    return _column("bool", meaning)


def _text(meaning: str, values: tuple[str, ...] = ()) -> Any:
    return _column("text", meaning, values)


def _phase(meaning: str) -> Any:
    return _column("text", meaning, PHASES, is_open=True)


@dataclass(frozen=True)
class StoredPart:
    """Rows of a table whose columns are read on first use: the verbs read few columns of large recordings.

    Attributes:
        read: Returns a whole stored column by its name, as an array or what indexes to one.
        rows: Number of rows.
        chosen: Which of the stored rows.
        given: Columns that are not stored.
        kept: Keeps the columns that were read, for the whole table alone.
    """

    read: Callable[[str], Any]
    rows: int
    chosen: Any = ...
    given: Mapping[str, Any] = field(default_factory=dict)
    kept: Any = None

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole table, as it is stored."""
        return self.chosen is ... and not self.given

    def column(self, name: str) -> Any:
        """Returns the values of a column."""
        return self.given[name] if name in self.given else self.read(name)[self.chosen]

    def take(self, rows: Any) -> StoredPart:
        """Returns some of its rows; reads nothing."""
        chosen = (np.arange(self.rows) if self.chosen is ... else self.chosen)[rows]
        return StoredPart(self.read, len(chosen), chosen, {name: values[rows] for name, values in self.given.items()})


@dataclass(frozen=True, eq=False)
class Table:
    """Equally long numpy columns; the base of every table. Those of a file are converted, or read, on first use."""

    table_name: ClassVar[str] = ""

    @classmethod
    def columns(cls) -> tuple[Column, ...]:
        """Lists the table's columns in file order."""
        return tuple(
            Column(f.name, f.metadata["kind"], f.metadata["meaning"], f.metadata["values"], f.metadata["is_open"])
            for f in dataclasses.fields(cls)
        )

    @classmethod
    def of(cls, **columns: Any) -> Self:
        """Builds a table from sequences, converting each to its column's dtype.

        Columns left out are filled with their missing value (0 or False where there is none).

        Raises:
            TypeError: An unknown column is given.
            ValueError: The columns differ in length.
        """
        length = len(next(iter(columns.values()))) if columns else 0
        built = {}
        for column in cls.columns():
            if column.name in columns:
                built[column.name] = np.asarray(columns.pop(column.name), dtype=column.dtype)
            else:
                fill = 0 if column.missing is None else column.missing
                built[column.name] = np.full(length, fill, dtype=column.dtype)
        if columns:
            raise TypeError(f"table {cls.table_name} has no column {', '.join(sorted(columns))}")
        if any(len(values) != length for values in built.values()):
            raise ValueError(f"columns of table {cls.table_name} differ in length")
        return cls(**built)

    @classmethod
    def stored(cls, part: StoredPart) -> Self:
        """Builds a table of stored columns."""
        table = object.__new__(cls)
        table.__dict__["_part"] = part
        return table

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            part = self.__dict__.get("_part")
            if part is None or name not in type(self).__dataclass_fields__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            values = self.__dict__[name] = part.column(name)
            return values

    @property
    def part(self) -> StoredPart | None:
        """What it consists of, if its columns are stored."""
        return self.__dict__.get("_part")

    @classmethod
    def empty(cls) -> Self:
        """Builds the table without rows."""
        return cls.of()

    @classmethod
    def joined(cls, tables: Sequence[Self]) -> Self:
        """Returns the rows of several tables, one table after the other."""
        if len(tables) < 2:
            return tables[0] if tables else cls.empty()
        names = [f.name for f in dataclasses.fields(cls)]
        return cls(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in names})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, f.name) for f in dataclasses.fields(self))

    def __len__(self) -> int:
        return self.part.rows if self.part else len(getattr(self, dataclasses.fields(self)[0].name))

    def take(self, rows: Any) -> Self:
        """Returns the table with only the given rows (indices, a mask, or a slice).

        Raises:
            IndexError: There is no such row, or the mask has another length.
        """
        if self.part:
            return self.stored(self.part.take(rows))
        return type(self)(**{f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)})

    def replace(self, **columns: Any) -> Self:
        """Returns the table with some columns replaced.

        Raises:
            TypeError: An unknown column is given.
            ValueError: A column has another length than the table.
        """
        if unknown := columns.keys() - self.__dataclass_fields__.keys():
            raise TypeError(f"table {self.table_name} has no column {', '.join(sorted(unknown))}")
        if any(len(values) != len(self) for values in columns.values()):
            raise ValueError(f"columns of table {self.table_name} differ in length")
        if self.part:
            return self.stored(dataclasses.replace(self.part, given={**self.part.given, **columns}))
        return dataclasses.replace(self, **columns)


@dataclass(frozen=True, eq=False)
class Modules(Table):
    """One row per nn.Module."""

    table_name: ClassVar[str] = "modules"

    module_id: Ints = _id("dense id, 0 first")
    name: Texts = _text("as in named_modules(); with several models, the root's type first")
    type: Texts = _text("class name")
    parent_id: Ints = _id("parent module; null for a root")
    parameter_bytes: Ints = _int("bytes of its parameters, without its children's")


@dataclass(frozen=True, eq=False)
class ModuleCalls(Table):
    """One row per module call."""

    table_name: ClassVar[str] = "module_calls"

    module_call_id: Ints = _id("dense id in order of entry")
    module_id: Ints = _id("the module called")
    parent_call_id: Ints = _id("enclosing call; null for the outermost")
    step: Ints = _int("number of the step in the job, 0 first")
    first_op_id: Ints = _id("first operator in it")
    last_op_id: Ints = _id("last operator in it")
    is_recompute: Bools = _bool("repeats a forward inside backward (activation checkpointing)")
    enters_hooks: Bools = _bool("operators in it are hooked by hooks entered within the call")


@dataclass(frozen=True, eq=False)
class Steps(Table):
    """One row per training step seen."""

    table_name: ClassVar[str] = "steps"

    step: Ints = _int("number of the step in the job, 0 first")
    kind: Texts = _text(
        "recorded; warm_up: the same, before the window; timed: operator times only; plain: step time only; "
        "skipped: memory only, before the window or while it pauses",
        STEP_KINDS,
    )
    start_us: Floats = _float("start time")
    duration_us: Floats = _float("duration without the recorder's pauses")
    micro_batches: Ints = _int("forward+backward rounds; 0 where not observed")
    optimizer_updates: Ints = _int("optimizer updates in it")
    first_op_id: Ints = _id("first operator in it")
    last_op_id: Ints = _id("last operator in it")
    is_complete: Bools = _bool("False when the recording ended inside it")


@dataclass(frozen=True, eq=False)
class Ops(Table):
    """One row per operator run, in order. Memory allocated between two has a row of its own."""

    table_name: ClassVar[str] = "ops"

    op_id: Ints = _id("dense id; the order of everything")
    step: Ints = _int("number of the step in the job, 0 first")
    micro_batch: Ints = _int("forward+backward round, 0 first")
    phase: Texts = _phase("part of the step")
    module_id: Ints = _id("innermost module whose forward or backward ran it")
    name: Texts = _text("operator and overload, such as aten.addmm.default")
    kind: Texts = _text("allocation: between operators", KINDS)
    start_us: Floats = _float("start time in the recorded step")
    duration_us: Floats = _float("duration without the recorder")
    stream: Ints = _int("device stream; 0 on CPU")
    flops: Ints = _int("of matrix products, convolutions and attention")
    read_bytes: Ints = _int("bytes of its input tensors")
    written_bytes: Ints = _int("bytes that it returns or mutates, excluding views")
    is_recompute: Bools = _bool("repeats a forward operator inside backward")
    forward_op_id: Ints = _id("forward operator that this backward operator belongs to")
    stack_id: Ints = _id("Python stack that called it; in backward, that of the forward operator")
    uses_rng: Bools = _bool("draws random numbers")
    mutates: Bools = _bool("writes into one of its inputs")
    is_hooked: Bools = _bool("the job's own saved_tensors_hooks take what autograd saves, or the job disabled hooks")
    workspace_bytes: Ints = _int(
        "peak inside it beyond what was alive before and its outputs; negative if it freed older memory"
    )


@dataclass(frozen=True, eq=False)
class Storages(Table):
    """One row per storage lifetime; temporaries inside one operator are in ops.workspace_bytes."""

    table_name: ClassVar[str] = "storages"

    storage_id: Ints = _id("dense id in order of allocation")
    category: Texts = _text("what it is for", CATEGORIES)
    category_source: Texts = _text("how the category of an imported allocation was determined", CATEGORY_SOURCES)
    name: Texts = _text("parameter or buffer name, with the state's key for optimizer state")
    module_id: Ints = _id("module that owns (parameter, buffer, gradient, state) or created it")
    device: Texts = _text("such as cpu or cuda:0")
    requested_bytes: Ints = _int("requested bytes")
    allocated_bytes: Ints = _int("bytes after the allocator's rounding; 0 for memory it does not own")
    created_op_id: Ints = _id("operator that created it; null when alive before the recording")
    freed_op_id: Ints = _id("last operator run before it was freed; null when alive at the end")
    held_op_id: Ints = _id("last operator until which local variables of forward hold it")
    shape: Texts = _text("sizes of the (first) tensor, such as 8x128x256")
    dtype: Texts = _text("element type of that tensor, such as float32")
    metadata: Texts = _text(
        "what the job noted in an imported snapshot: metadata set when it was allocated, then each annotation"
    )


@dataclass(frozen=True, eq=False)
class Uses(Table):
    """One row per operator and storage it uses."""

    table_name: ClassVar[str] = "uses"

    op_id: Ints = _id("the operator")
    storage_id: Ints = _id("the storage")
    role: Texts = _text("write: an output; mutate: an input changed in place", ROLES)


@dataclass(frozen=True, eq=False)
class Saved(Table):
    """One row per storage saved for backward by a forward operator."""

    table_name: ClassVar[str] = "saved"

    storage_id: Ints = _id("the saved storage")
    forward_op_id: Ints = _id("the forward operator whose backward reads it")
    module_id: Ints = _id("module of that operator")
    released_op_id: Ints = _id("last backward operator of it that reads the storage")


@dataclass(frozen=True, eq=False)
class Memory(Table):
    """One row per operator and device: the allocator's own counters."""

    table_name: ClassVar[str] = "memory"

    op_id: Ints = _id("the operator")
    time_us: Floats = _float("when it happened or was sampled")
    device: Texts = _text("such as cpu or cuda:0")
    allocated_bytes: Ints = _int("peak while the operator ran")
    active_bytes: Ints = _int("the same, plus bytes pending free (in use by another stream)")
    reserved_bytes: Ints = _id("segments held by the allocator; null on CPU")
    host_rss_bytes: Ints = _id("resident memory of the process")


@dataclass(frozen=True, eq=False)
class HostMemory(Table):
    """One row per sample of one process of the job."""

    table_name: ClassVar[str] = "host_memory"

    time_us: Floats = _float("when it happened or was sampled")
    pid: Ints = _id("process id")
    role: Texts = _text("trainer, worker (a DataLoader worker) or child")
    rss_bytes: Ints = _int("resident memory")
    peak_rss_bytes: Ints = _id("most resident memory so far, between samples too")
    private_bytes: Ints = _id("resident memory not shared with another process")
    heap_bytes: Ints = _id("resident memory of no file: heaps, stacks, tensors")
    anonymous_bytes: Ints = _id("its share of that: what processes have in common counts in equal parts")
    shared_bytes: Ints = _id("its share of shared memory, such as tensors in /dev/shm")
    file_bytes: Ints = _id("its share of mapped files, most of which the kernel can drop and read again")
    swapped_bytes: Ints = _id("its share of memory that was swapped out")


@dataclass(frozen=True, eq=False)
class HostLimits(Table):
    """One row per sample of a limit on the memory of the job's processes together."""

    table_name: ClassVar[str] = "host_limits"

    time_us: Floats = _float("when it happened or was sampled")
    name: Texts = _text("what has the limit", HOST_LIMITS)
    total_bytes: Ints = _int("the limit")
    used_bytes: Ints = _int("of it, in use by all processes")


@dataclass(frozen=True, eq=False)
class HostHeap(Table):
    """One row per sample of the heaps inside a process."""

    table_name: ClassVar[str] = "host_heap"

    time_us: Floats = _float("when it happened or was sampled")
    used_bytes: Ints = _id("in use in the heap of the C library, with torch's tensors; null for others than glibc's")
    free_bytes: Ints = _id("freed, but kept by that heap; null for others than glibc's")
    python_blocks: Ints = _int("small objects of Python")
    held_bytes: Ints = _id("of tensors in main memory and of numpy arrays in containers; null where not counted then")


@dataclass(frozen=True, eq=False)
class HostNeeds(Table):
    """One row per kind and size of host memory that a line of the job takes."""

    table_name: ClassVar[str] = "host_needs"

    kind: Texts = _text("what takes it", NEED_KINDS)
    stack_id: Ints = _id("Python stack of the call that makes the DataLoader, or pins")
    loader: Ints = _id("number of the DataLoader")
    count: Ints = _int("workers, tensors of a batch, or blocks")
    batches: Ints = _int("batches in flight at most; 0 for what is in none")
    requested_bytes: Ints = _int("requested bytes of each")
    size_bytes: Ints = _int("bytes that each takes: pages, or a power of two")


@dataclass(frozen=True, eq=False)
class AllocatorEvents(Table):
    """One row per allocator action, in order."""

    table_name: ClassVar[str] = "allocator_events"

    index: Ints = _id("position in the allocator's own order")
    time_us: Floats = _float("when it happened or was sampled")
    device: Texts = _text("such as cpu or cuda:0")
    action: Texts = _text("what the allocator did", ACTIONS)
    address: Ints = _int("address of the memory; addresses are reused")
    size_bytes: Ints = _int("requested bytes; positive for frees too")
    block_bytes: Ints = _id("bytes of the block allocated or freed")
    stream: Ints = _int("device stream; 0 on CPU")
    pool: Texts = _text("allocator pool; null for the default")
    op_id: Ints = _id("operator running, or the last one before")
    stack_id: Ints = _id("Python stack")
    compile_context: Texts = _text("what torch.compile was compiling or running")
    user_metadata: Texts = _text(
        "what the job set with torch.cuda.memory._set_memory_metadata, as JSON; of annotate, its text"
    )
    internal_metadata: Texts = _text("the allocator's own remark on the action")


@dataclass(frozen=True, eq=False)
class Annotations(Table):
    """One row per named time span of an imported snapshot."""

    table_name: ClassVar[str] = "annotations"

    device: Texts = _text("such as cpu or cuda:0")
    name: Texts = _text("name of the span")
    start_us: Floats = _float("start time; null where it began before the recording")
    end_us: Floats = _float("end time; null where it ended after the recording")


@dataclass(frozen=True, eq=False)
class Segments(Table):
    """One row per segment of a device allocator."""

    table_name: ClassVar[str] = "segments"

    device: Texts = _text("such as cpu or cuda:0")
    address: Ints = _int("first byte")
    total_size_bytes: Ints = _int("size of the segment")
    allocated_size_bytes: Ints = _int("bytes in use")
    active_size_bytes: Ints = _int("bytes in use or pending free")
    requested_size_bytes: Ints = _int("requested bytes of the blocks in use")
    stream: Ints = _int("device stream; 0 on CPU")
    segment_type: Texts = _text("small or large", ("small", "large"))
    segment_pool: Texts = _text("pool it belongs to; null for the default")
    is_expandable: Bools = _bool("grows in place")


@dataclass(frozen=True, eq=False)
class DeviceMemory(Table):
    """One row per sample of a whole device."""

    table_name: ClassVar[str] = "device_memory"

    time_us: Floats = _float("when it happened or was sampled")
    device: Texts = _text("such as cpu or cuda:0")
    total_bytes: Ints = _int("memory of the device")
    used_bytes: Ints = _int("in use by all processes, as nvidia-smi shows it")
    process_bytes: Ints = _id("in use by this process")
    reserved_bytes: Ints = _int("of it, segments of torch's caching allocator")
    pinned_bytes: Ints = _id("pinned host memory held by torch")


@dataclass(frozen=True, eq=False)
class StepPeaks(Table):
    """One row per step and device of a light recording: the peak of the step."""

    table_name: ClassVar[str] = "step_peaks"

    step: Ints = _int("number of the step in the job, 0 first")
    device: Texts = _text("such as cpu or cuda:0")
    phase: Texts = _phase("part of the step")
    module_id: Ints = _id("innermost module then")
    allocated_bytes: Ints = _int("peak seen")
    reserved_bytes: Ints = _id("segments held by the allocator; null on CPU")
    how: Texts = _text(
        "heard: every allocation; told: the allocator's own peak; counted: at the edges of module calls and updates",
        PEAK_SOURCES,
    )
    end_bytes: Ints = _id("allocated at the end of the step; null in recordings of earlier versions")
    input_elements: Ints = _id("elements of the inputs of the models in training; null in those, too")


@dataclass(frozen=True, eq=False)
class ModulePeaks(Table):
    """One row per phase and module of a light recording: the peak over the whole run."""

    table_name: ClassVar[str] = "module_peaks"

    module_id: Ints = _id("innermost module then")
    phase: Texts = _phase("part of the step")
    step: Ints = _int("first step that reached it")
    device: Texts = _text("such as cpu or cuda:0")
    allocated_bytes: Ints = _int("peak allocated bytes there")


@dataclass(frozen=True, eq=False)
class OutOfMemory(Table):
    """One row per failed memory request."""

    table_name: ClassVar[str] = "out_of_memory"

    time_us: Floats = _float("when it happened or was sampled")
    device: Texts = _text("such as cpu or cuda:0")
    step: Ints = _id("step it happened in")
    op_id: Ints = _id("operator that made the request, or the last one before")
    name: Texts = _text("operator that made the request")
    phase: Texts = _phase("part of the step")
    module_id: Ints = _id("innermost module then")
    stack_id: Ints = _id("Python stack of the request")
    requested_bytes: Ints = _id("requested bytes, at most 2**60")
    allocated_bytes: Ints = _id("allocated bytes at the time")
    reserved_bytes: Ints = _id("segments held by the allocator; null on CPU")
    largest_free_bytes: Ints = _id("largest free block in those segments")
    free_bytes: Ints = _id("free bytes of the device")
    total_bytes: Ints = _id("memory of the device, or the limit it has")
    is_caught: Bools = _bool("the job continued after it")
    message: Texts = _text("first line of the error")


@dataclass(frozen=True, eq=False)
class Holders(Table):
    """One row per tensor whose holder was looked up."""

    table_name: ClassVar[str] = "holders"

    step: Ints = _int("step at whose end it was looked up")
    device: Texts = _text("such as cpu or cuda:0")
    storage_id: Ints = _id("the tensor's storage")
    kind: Texts = _text("what holds it", HOLDER_KINDS)
    chain: Texts = _text("from a variable to the tensor, such as history['loss'][3]")
    container: Texts = _text("type of the object that the variable refers to")
    stack_id: Ints = _id("stack of one frame: where the variable is")
    shape: Texts = _text("sizes of the (first) tensor, such as 8x128x256")
    dtype: Texts = _text("element type of that tensor, such as float32")
    has_graph: Bools = _bool("it has an autograd graph")
    tensors: Ints = _int(
        "tensors of this kind that Python held then; with `made_step`, those of that step and line; 0 for a large one "
        "that training does not keep"
    )
    total_bytes: Ints = _int("bytes of their storages")
    made_step: Ints = _id("step in which they were made, where it was followed")
    op: Texts = _text("operator that made them")
    module_id: Ints = _id("innermost module then")
    made_stack_id: Ints = _id("Python stack of that operator")
    is_by_graph: Bools = _bool("the chain leads to a tensor whose autograd graph holds them")


@dataclass(frozen=True, eq=False)
class Optimizers(Table):
    """One row per optimizer, in its last recorded state."""

    table_name: ClassVar[str] = "optimizers"

    optimizer_id: Ints = _id("dense id in the order found")
    name: Texts = _text("class, with its module, such as torch.optim.adamw.AdamW")
    settings: Texts = _text("plain settings of its first parameter group, as JSON")
    parameters: Ints = _int("parameters it updates")
    parameter_bytes: Ints = _int("their bytes")
    elements: Ints = _int("their elements")
    state_bytes: Ints = _int("bytes of its state by then; 0 before its first update")
    full_state_bytes: Ints = _id("the same once every parameter has been updated")
    updates: Ints = _int("updates seen")


@dataclass(frozen=True, eq=False)
class ReadValues(Table):
    """One row per value that the job read from a tensor, in order.

    A dry run of the same job replays them (docs/dry-run.md). They may be data: ``--scrub`` leaves the table out.
    """

    table_name: ClassVar[str] = "read_values"

    step: Ints = _int("number of the step in the job, 0 first")
    line: Texts = _text("as file:line:function; torch's own is followed by that of the job")
    name: Texts = _text("operator, such as aten._local_scalar_dense.default, or Tensor.tolist or Tensor.numpy")
    previous: Texts = _text("operator that ran before")
    elements: Ints = _int("of the tensor that it depends on; 1 for a single value")
    value: Texts = _text("the value as JSON; of a result whose size depends on values, its rows")


@dataclass(frozen=True, eq=False)
class Stacks(Table):
    """One row per distinct Python stack."""

    table_name: ClassVar[str] = "stacks"

    stack_id: Ints = _id("dense id")
    frames: Texts = _text("a line each, innermost first, as file:line:function")
    fx_nodes: Texts = _text("one line for each frame of a torch.fx graph: operation, node, line it was traced from")


@dataclass(frozen=True, eq=False)
class Ranks(Table):
    """One row per rank of the file; values are of its fullest step."""

    table_name: ClassVar[str] = "ranks"

    rank: Ints = _id("the rank")
    node: Texts = _text("machine it ran on")
    clock: Texts = _text("clock of its times")
    device: Texts = _text("device that holds most of its bytes")
    step: Ints = _id("the fullest step")
    ops: Ints = _int("operators of that step")
    step_time_us: Floats = _float("duration without the recorder")
    peak_bytes: Ints = _id("peak allocated bytes of that step")
    reserved_bytes: Ints = _id("peak reserved bytes of that step; null on CPU")
    is_complete: Bools = _bool("the requested window was recorded")
    ends_at: Texts = _text("where an incomplete one ends, and why")
    last_step: Ints = _id("last step seen")
    last_us: Floats = _float("end of the last operator or step seen")


@dataclass(frozen=True, eq=False)
class RankMoments(Table):
    """One row per rank and phase: the peak of the phase in the fullest step."""

    table_name: ClassVar[str] = "rank_moments"

    rank: Ints = _id("the rank")
    phase: Texts = _phase("part of the step; null for the peak of the whole step")
    op_id: Ints = _id("the operator, counted in the step")
    name: Texts = _text("name of the operator")
    module: Texts = _text("its module; null for a model itself")
    in_phase: Texts = _phase("part of the step it is in")
    allocated_bytes: Ints = _int("live bytes while it ran")


@dataclass(frozen=True, eq=False)
class RankParts(Table):
    """One row per rank and part of its peak; the parts of a kind sum to it."""

    table_name: ClassVar[str] = "rank_parts"

    rank: Ints = _id("the rank")
    kind: Texts = _text("what the peak is split by", ("category", "module"))
    name: Texts = _text("category, or module that owns or created it")
    allocated_bytes: Ints = _int("live bytes of the part")


@dataclass(frozen=True, eq=False)
class RankCollectives(Table):
    """One row per rank and collective that it ran in a recorded step."""

    table_name: ClassVar[str] = "rank_collectives"

    rank: Ints = _id("the rank")
    step: Ints = _int("number of the step in the job, 0 first")
    place: Ints = _int("index among them in that step, 0 first")
    name: Texts = _text("operator and overload, such as aten.addmm.default")
    phase: Texts = _phase("part of the step")
    read_bytes: Ints = _int("bytes of its input tensors")
    start_us: Floats = _float("when the rank reached it, by its own clock")
    over_us: Floats = _float("when it had certainly finished, by the same clock")


@dataclass(frozen=True, eq=False)
class RankCurve(Table):
    """One row per rank and stretch of its fullest step."""

    table_name: ClassVar[str] = "rank_curve"

    rank: Ints = _id("the rank")
    place: Ints = _int("index in the step, 0 first")
    allocated_bytes: Ints = _int("peak live bytes in it")


TABLES: tuple[type[Table], ...] = (
    Modules,
    ModuleCalls,
    Steps,
    Ops,
    Storages,
    Uses,
    Saved,
    Memory,
    HostMemory,
    HostLimits,
    HostHeap,
    HostNeeds,
    AllocatorEvents,
    Annotations,
    Segments,
    DeviceMemory,
    StepPeaks,
    ModulePeaks,
    OutOfMemory,
    Holders,
    Optimizers,
    Stacks,
    ReadValues,
)

#: Tables of a whole file, outside its rank folders. Files of a single process have none.
RANK_TABLES: tuple[type[Table], ...] = (Ranks, RankMoments, RankParts, RankCollectives, RankCurve)


def is_beside(phase: Texts) -> Bools:
    """Returns which operators are outside training, by phase: not forward, backward or an update."""
    beside: Bools = ~np.isin(phase, TRAINING)
    return beside


def reference() -> str:
    """Renders the format reference as Markdown."""
    tables = (*TABLES, *RANK_TABLES)
    often = Counter(column for table in tables for column in table.columns())
    lines = [
        "# The trace format",
        "",
        f"Schema version {SCHEMA_VERSION}. Generated by `python -m memprof.trace.schema > docs/trace-format.md`.",
        "",
        "A `.memprof` file is an uncompressed zip of `manifest.json` and one Parquet file per table, in a folder",
        "for each rank (`rank0/ops.parquet`, …). The tables whose names begin with rank are outside those folders.",
        "Read it from Python ([python.md](python.md)), or as plain tables: `memprof export --to parquet`",
        "([export.md](export.md)).",
        "",
        "- Ids (`_id`), bytes (`_bytes`) and columns marked *int* are 64-bit integers; `_us` are floats, Unix time or",
        "  durations in microseconds; `is_`, `has_` and columns marked *bool* are truth values; others are texts.",
        "- Null means unknown, or none: outside a module, without a stack, where the allocator has no such number.",
        "- Order is `op_id`.",
        f"- A phase is {', '.join(PHASES)}, or a name defined by the job.",
        "",
        "Columns that several tables have:",
        "",
        *(_described(column) for column, count in often.items() if count > 1),
        "",
        "## Coded columns",
        "",
        "From version 2 on, a column of the file is",
        "",
        "- left out, if it has no value in any row (0 and false for columns that are never null);",
        "- left out, if all rows have the same value: `constant` gives it, in the JSON under the key `memprof` of the",
        "  Parquet file's metadata;",
        "- left out, if it equals another: `same` names it, `ops.start_us` for one of another table with as many rows;",
        "- stored under its name and, after a colon, how the values that are not null are coded:",
        "",
        "| suffix | stored |",
        "|---|---|",
        "| `t` | times, as integers of 2⁻¹⁰ µs |",
        "| `d` | the first value, and the difference of each further one to the one before, modulo 2⁶⁴ |",
        "| `r` | the number of values since the last equal one; 0 where a value appears for the first time |",
        "| `n` | the values that `r` has 0 for, in order, then nulls |",
    ]
    for table in tables:
        shared = [f"`{column.name}`" for column in table.columns() if often[column] > 1]
        lines += ["", f"## {table.table_name}", "", " ".join((table.__doc__ or "").split()), ""]
        lines += [f"- {', '.join(shared)}"] if shared else []
        lines += [_described(column) for column in table.columns() if often[column] == 1]
    return "\n".join(lines) + "\n"


def _described(column: Column) -> str:
    is_named = column.name.endswith(("_id", "_bytes", "_us")) or column.name.startswith(("is_", "has_"))
    kind = "" if is_named or column.kind == "text" else " *bool*" if column.kind == "bool" else " *int*"
    values = f" ({', '.join(column.values)})" if column.values and not column.is_open else ""
    return f"- `{column.name}`{kind}: {column.meaning}{values}"


if __name__ == "__main__":
    print(reference(), end="")
