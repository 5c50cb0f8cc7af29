"""Writes Chrome trace events, one per line, with operators' start and end in whole nanoseconds.

Source: the trace event format, "Trace Event Format" (N. Duca, D. Sinclair, 2016): complete events (X) on threads,
counters (C), nestable asynchronous events (b, e), instant events (i) and metadata (M). Times are microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from memprof.trace.files.parquet import arrow_numbers, arrow_texts
from memprof.trace.schema import DeviceMemory, Floats, HostMemory, Ints, Ops, Steps
from memprof.trace.store import Trace

#: Drawn duration of an operator whose duration is unknown.
_UNKNOWN_NS = 1000
#: Rows formatted at a time.
CHUNK = 50_000
#: The three digits of each number below a thousand.
_DIGITS = [f"{number:03d}" for number in range(1000)]


def whole_text(text: str) -> str:
    """Returns a text with lone surrogates, which file names may hold and UTF-8 cannot encode, replaced by ?.

    Perfetto rejects a whole file for a single one, even escaped.
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


@dataclass(frozen=True, eq=False)
class Times:
    """Times of one rank, in nanoseconds after the start of the timeline.

    Attributes:
        base_us: Start of the timeline, Unix time.
        start_ns: Start of each operator, strictly increasing. Shape ``(ops,)``.
        end_ns: End of each operator, at most the start of the next; durations are those without the recorder.
    """

    base_us: float
    start_ns: Ints
    end_ns: Ints

    def of_us(self, moments_us: Floats) -> Ints:
        """Converts moments of Unix time; unknown ones and those before the start of the timeline become its start."""
        since = np.where(np.isfinite(moments_us), moments_us - self.base_us, 0.0)
        moments: Ints = np.maximum(np.rint(since * 1000), 0).astype(np.int64)
        return moments


def earliest_us(trace: Trace) -> float:
    """Returns the first moment of a rank, Unix time; infinite where it has no operators and no steps."""
    moments = [trace.columns(kind, "start_us")["start_us"] for kind in (Ops, Steps)]
    if not any(len(one) for one in moments):
        return math.inf
    moments += [trace.columns(kind, "time_us")["time_us"] for kind in (HostMemory, DeviceMemory)]
    known = [one[np.isfinite(one)] for one in moments]
    # Where no time is known, the order of the operators is used.
    return min((float(one.min()) for one in known if len(one)), default=0.0)


def time_operators(trace: Trace, base_us: float) -> Times:
    """Assigns times to a rank's operators.

    The order is ``op_id``. Clocks tie or are read in several threads: an operator whose clock precedes an earlier
    operator's starts one nanosecond after it.

    Args:
        trace: The rank.
        base_us: Start of the timeline, Unix time by the rank's clock.
    """
    columns = trace.columns(Ops, "start_us", "duration_us")
    start_us, duration_us = columns["start_us"], columns["duration_us"]
    place = np.arange(len(start_us))
    times = Times(base_us, place, place)
    start = np.maximum.accumulate(times.of_us(start_us) - place) + place if len(place) else place
    known = np.isfinite(duration_us)
    lasts = np.where(known, np.rint(np.where(known, duration_us, 0.0) * 1000), _UNKNOWN_NS).astype(np.int64)
    end = start + np.maximum(lasts, 1)
    end[:-1] = np.minimum(end[:-1], start[1:])
    return Times(base_us, start, end)


def write_events(file: BinaryIO, events: Iterable[list[str] | Lines], about: dict[str, Any]) -> None:
    """Writes a file of events as they are generated, holding only the current ones in memory."""
    file.write(f'{{"displayTimeUnit":"ms","otherData":{quoted(about)},"traceEvents":[\n'.encode())
    separator = b""
    for some in events:
        if len(some):
            file.write(separator)
            file.write(memoryview(some.data)[:-2] if isinstance(some, Lines) else ",\n".join(some).encode())
            separator = b",\n"
    file.write(b"\n]}\n")


@dataclass(frozen=True)
class Lines:
    """Events as ASCII, each followed by a comma and a line break: those of millions of rows."""

    rows: int
    data: pa.Buffer

    def __len__(self) -> int:
        return self.rows

    @staticmethod
    def of(*parts: str | Ints | list[str] | pa.DictionaryArray[Any, Any]) -> Lines:
        """Joins constant texts, integers and texts, row by row."""
        import pyarrow.compute as pc  # takes longer to import than to write a small table

        def arrow(part: Any) -> Any:
            if isinstance(part, np.ndarray):
                return arrow_numbers(part).cast(pa.large_string())
            if isinstance(part, str):
                return as_texts([part])[0]  # a plain one would import pandas
            return as_texts(part) if isinstance(part, list) else part.dictionary_decode()

        joined = pc.binary_join_element_wise(*map(arrow, (*parts, ",\n", "")))
        return Lines(len(joined), joined.buffers()[2] or pa.py_buffer(b""))


#: Some events, as they are written.
Events = list[str] | Lines


def quoted(value: str | bool | dict[str, Any]) -> str:
    """Returns a text, or an object of texts and numbers, as ASCII JSON, so that no name can break the file."""
    if isinstance(value, str):
        value = whole_text(value)
    elif isinstance(value, dict):
        value = {key: whole_text(one) if isinstance(one, str) else one for key, one in value.items()}
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def named_process(process: int, name: str, place: int) -> list[str]:
    """Names a process, and sets its position among the others."""
    return [
        f'{{"ph":"M","pid":{process},"tid":0,"name":"process_name","args":{{"name":{quoted(name)}}}}}',
        f'{{"ph":"M","pid":{process},"tid":0,"name":"process_sort_index","args":{{"sort_index":{place}}}}}',
    ]


def named_thread(process: int, thread: int, name: str) -> list[str]:
    """Names a thread of a process; threads are sorted by number."""
    return [
        f'{{"ph":"M","pid":{process},"tid":{thread},"name":"thread_name","args":{{"name":{quoted(name)}}}}}',
        f'{{"ph":"M","pid":{process},"tid":{thread},"name":"thread_sort_index","args":{{"sort_index":{thread}}}}}',
    ]


def slices(
    process: int, thread: int, start_ns: Ints, end_ns: Ints, heads: Sequence[Any], arguments: Sequence[Any]
) -> Iterator[Lines]:
    """Writes events that run on a thread, some at a time.

    Args:
        process: The process.
        thread: The thread.
        start_ns: Start of each, in nanoseconds.
        end_ns: End of each, in nanoseconds.
        heads: Name and category of each, as ``"name":"...","cat":"..."`` in parts, as for ``Lines.of``.
        arguments: Further arguments of each, as the inside of a JSON object in parts.
    """
    frame = f'{{"ph":"X","pid":{process},"tid":{thread},'
    start, lasts = _us_parts(start_ns), _us_parts(end_ns - start_ns)
    parts = (frame, *heads, ',"ts":', *start, ',"dur":', *lasts, ',"args":{', *arguments, "}}")
    for low in range(0, len(start_ns), CHUNK):
        yield Lines.of(*(part if isinstance(part, str) else part[low : low + CHUNK] for part in parts))


def counter(process: int, name: str, time_ns: Ints, values: Ints) -> Iterator[Lines]:
    """Writes a counter of bytes, some events at a time; each value holds until the next."""
    frame = f'{{"ph":"C","pid":{process},"tid":0,"name":{quoted(name)},"ts":'
    for low in range(0, len(time_ns), CHUNK):
        rows = slice(low, low + CHUNK)
        yield Lines.of(frame, *_us_parts(time_ns[rows]), ',"args":{"bytes":', values[rows], "}}")


def formatted(values: Any, form: Callable[[Any], str]) -> pa.DictionaryArray[Any, Any]:
    """Returns numbers as texts, each distinct one formatted once."""
    distinct, codes = np.unique(values, return_inverse=True)
    return chosen([form(value) for value in distinct.tolist()], codes)


def life(process: int, number: int, name: str, start_ns: int, end_ns: int, arguments: dict[str, Any]) -> list[str]:
    """Writes a time span that may overlap others.

    Args:
        process: The process.
        number: The span's number, unique in the process.
        name: Display name.
        start_ns: Start, in nanoseconds.
        end_ns: End, in nanoseconds.
        arguments: Further arguments.
    """
    frame = f'"pid":{process},"tid":0,"cat":"storage","id2":{{"local":"{number:#x}"}},"name":{quoted(name)}'
    return [
        f'{{"ph":"b",{frame},"ts":{_us(start_ns)},"args":{quoted(arguments)}}}',
        f'{{"ph":"e",{frame},"ts":{_us(end_ns)}}}',
    ]


def instant(process: int, name: str, time_ns: int, arguments: dict[str, Any]) -> str:
    """Writes an instant event of a whole process."""
    frame = f'{{"ph":"i","s":"p","pid":{process},"tid":0,"name":{quoted(name)}'
    return f'{frame},"ts":{_us(time_ns)},"args":{quoted(arguments)}}}'


def _us_parts(time_ns: Ints) -> tuple[Ints, str, pa.DictionaryArray[Any, Any]]:
    """Returns nanoseconds as microseconds for ``Lines.of``."""
    whole = time_ns // 1000
    return whole, ".", chosen(_DIGITS, time_ns - 1000 * whole)


def as_texts(texts: list[str]) -> pa.Array[Any]:
    """Returns texts as Arrow; what is joined of them may exceed 2 GiB."""
    return arrow_texts(texts).cast(pa.large_string())


def chosen(texts: list[str] | pa.Array[Any], codes: Any) -> pa.DictionaryArray[Any, Any]:
    """Returns the text of each code; where there are many texts, from ``as_texts`` of all."""
    distinct = as_texts(texts) if isinstance(texts, list) else texts
    return pa.DictionaryArray.from_arrays(arrow_numbers(codes), distinct)


def _us(time_ns: int) -> str:
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"
