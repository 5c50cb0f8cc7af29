"""Writes Chrome trace events, one per line, for ui.perfetto.dev and chrome://tracing.

Source: the trace event format, "Trace Event Format" (N. Duca, D. Sinclair, 2016): complete events (X) on threads,
counters (C), nestable asynchronous events (b, e), instant events (i) and metadata (M). Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from memprof.trace.exporters.texts import whole_text
from memprof.trace.schema import Ints

#: Rows formatted at a time.
_CHUNK = 50_000


def write_events(file: BinaryIO, events: Iterable[str], about: dict[str, Any]) -> None:
    """Writes a file of events as they are generated, holding only the current ones in memory.

    Args:
        file: The destination.
        events: The events, each as JSON.
        about: The file's metadata.
    """
    file.write(f'{{"displayTimeUnit":"ms","otherData":{quoted(about)},"traceEvents":[\n'.encode())
    held: list[str] = []
    separator = b""
    for event in events:
        held.append(event)
        if len(held) == _CHUNK:
            file.write(separator + ",\n".join(held).encode())
            separator = b",\n"
            held.clear()
    file.write((separator if held else b"") + ",\n".join(held).encode() + b"\n]}\n")


def quoted(value: str | bool | dict[str, Any]) -> str:
    """Returns a text, or an object of texts and numbers, as ASCII JSON, so that no name can break the file."""
    if isinstance(value, str):
        value = whole_text(value)
    elif isinstance(value, dict):
        value = {key: whole_text(one) if isinstance(one, str) else one for key, one in value.items()}
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def named_process(process: int, name: str, place: int) -> Iterator[str]:
    """Names a process, and sets its position among the others."""
    yield f'{{"ph":"M","pid":{process},"tid":0,"name":"process_name","args":{{"name":{quoted(name)}}}}}'
    yield f'{{"ph":"M","pid":{process},"tid":0,"name":"process_sort_index","args":{{"sort_index":{place}}}}}'


def named_thread(process: int, thread: int, name: str) -> Iterator[str]:
    """Names a thread of a process; threads are sorted by number."""
    yield f'{{"ph":"M","pid":{process},"tid":{thread},"name":"thread_name","args":{{"name":{quoted(name)}}}}}'
    yield f'{{"ph":"M","pid":{process},"tid":{thread},"name":"thread_sort_index","args":{{"sort_index":{thread}}}}}'


def slices(
    process: int, thread: int, start_ns: Ints, end_ns: Ints, heads: Sequence[str], arguments: Sequence[str]
) -> Iterator[str]:
    """Writes the events that run on a thread.

    Args:
        process: The process.
        thread: The thread.
        start_ns: Start of each, in nanoseconds.
        end_ns: End of each, in nanoseconds.
        heads: Name and category of each, as ``"name":"...","cat":"..."``.
        arguments: Further arguments of each, as the inside of a JSON object.
    """
    frame = f'{{"ph":"X","pid":{process},"tid":{thread},'
    for start, end, head, more in zip(start_ns.tolist(), end_ns.tolist(), heads, arguments, strict=True):
        yield f'{frame}{head},"ts":{_us(start)},"dur":{_us(end - start)},"args":{{{more}}}}}'


def counter(process: int, name: str, time_ns: Ints, values: Ints) -> Iterator[str]:
    """Writes a counter of bytes; each value holds until the next."""
    frame = f'{{"ph":"C","pid":{process},"tid":0,"name":{quoted(name)},"ts":'
    for time, value in zip(time_ns.tolist(), values.tolist(), strict=True):
        yield f'{frame}{_us(time)},"args":{{"bytes":{value}}}}}'


def life(process: int, number: int, name: str, start_ns: int, end_ns: int, arguments: dict[str, Any]) -> Iterator[str]:
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
    yield f'{{"ph":"b",{frame},"ts":{_us(start_ns)},"args":{quoted(arguments)}}}'
    yield f'{{"ph":"e",{frame},"ts":{_us(end_ns)}}}'


def instant(process: int, name: str, time_ns: int, arguments: dict[str, Any]) -> str:
    """Writes an instant event of a whole process."""
    frame = f'{{"ph":"i","s":"p","pid":{process},"tid":0,"name":{quoted(name)}'
    return f'{frame},"ts":{_us(time_ns)},"args":{quoted(arguments)}}}'


def _us(time_ns: int) -> str:
    """Writes nanoseconds as microseconds, exactly."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"
