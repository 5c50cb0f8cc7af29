"""Does the model of the caching allocator match this device's allocator, segment by segment?"""

from __future__ import annotations

from lab.gpu.exact import configurations, recording_of
from lab.gpu.reading import allocator_settings
from lab.gpu.runs import Job, side_by_side, train
from lab.gpu.section import Found, Place
from memprof.replay.allocator.blocks import ALLOCATED
from memprof.replay.allocator.blocks import FREE as BLOCK_FREE
from memprof.replay.allocator.events import ALLOCATE, FREE, Replay, replay
from memprof.replay.allocator.model import SegmentEvent
from memprof.replay.allocator.recorded_requests import requests_of_trace
from memprof.replay.allocator.rules import Settings
from memprof.trace.schema import NONE, AllocatorEvents, Memory, Segments, Storages
from memprof.trace.store import Trace
from tests.devices import compare_recording
from tests.replay.allocator.recorded import Comparison, compare
from tests.replay.allocator.snapshots import read_devices

TITLE = "The caching allocator's model against this device's allocator"
HOW = (
    "Own history: torch's memory history and final snapshot of whole runs, without memprof; every segment, address and "
    "final block must be the model's. Recordings: the events memprof wrote; every segment and address, and the highest "
    "reserved bytes."
)
COLUMNS = ("run", "allocations", "segment events", "blocks", "ties", "reserved peak", "recorded", "differ")
_STEPS = 4
_SHOWN = 3

_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
OWN_HISTORIES = {
    "gpt fp32": Job("gpt", ("--form", "foreach")),
    "gpt bf16 expandable": Job("gpt", ("--precision", "bf16"), _EXPANDABLE),
    "resnet50 fp32": Job("resnet50", ("--optimizer", "sgd")),
    "lstm bf16": Job("lstm", ("--precision", "bf16")),
    "unet fp32 expandable": Job("unet", ("--optimizer", "sgd"), _EXPANDABLE),
}


def measure(place: Place, found: Found) -> None:
    """Compares the model with histories of torch's own, then with memprof's recordings."""
    wrong = 0
    if place.is_rehearsal:
        wrong += _rehearse(place, found)
    else:
        items = [(name, (name, job)) for name, job in OWN_HISTORIES.items()]
        for (name, _), (compared, reserved) in side_by_side(place, found, items, lambda item: _own(place, *item)):
            wrong += _add(found, f"own history: {name}", compared, reserved, len(compared.mismatches))
        wrong += _recordings(place, found)
    rows = len(found.section.rows)
    found.bar(f"nothing differs: {wrong} differences in {rows} runs", not wrong and rows > 0)


def _own(place: Place, name: str, job: Job) -> tuple[Comparison, int]:
    path = place.folder("work") / f"history-{name.replace(' ', '-')}.pickle"
    script = Job(job.model, (*job.arguments, "--history", str(path)), job.variables)
    steps = train(place, script, _STEPS).steps
    (device,) = (one for one in read_devices(path) if one.number == 0)
    if not len(device.events):
        raise RuntimeError("torch kept no history")
    compared = compare(device.events, device.end, device.settings)
    path.unlink()
    return compared, max(int(step["reserved_bytes"]) for step in steps)


def _recordings(place: Place, found: Found) -> int:
    wrong = seen = 0
    for one in configurations(place):
        path = recording_of(place, one)
        if not path.exists():
            continue
        if place.is_over:
            found.note(f"No time was left for {path.name} and those after it.")
            break
        trace = Trace.open(path)
        events, segments, memory = (trace.table(table) for table in (AllocatorEvents, Segments, Memory))
        own = [table.take(table.device == place.device_name) for table in (events, segments, memory)]
        try:
            storages = trace.table(Storages)
            is_left = (storages.device == place.device_name) & (storages.freed_op_id == NONE)
            alive_bytes = int(storages.allocated_bytes[is_left].sum())
            compared, differ = compare_recording(own[0], own[1], allocator_settings(trace.manifest), alive_bytes)
        except ValueError as error:
            found.note(f"{path.name}: {error}.")
            continue
        seen += 1
        recorded = int(own[2].reserved_bytes.max(initial=NONE))
        wrong += _add(found, f"recording: {one.name}", compared, recorded, differ)
    if not seen:
        found.note("No recording was compared: run the section exact first.")
    return wrong


def _rehearse(place: Place, found: Found) -> int:
    """Compares the model with itself: what it does with a recording's requests is written down as if recorded."""
    wrong = 0
    for one in configurations(place):
        path = recording_of(place, one)
        if not path.exists():
            continue
        trace = Trace.open(path)
        done = replay(requests_of_trace(trace).requests)
        for share in (0.0, 0.5):
            events, segments = written_down(done, share)
            alive_bytes = int(segments.allocated_size_bytes.sum())  # the model's own
            compared, differ = compare_recording(events, segments, Settings(), alive_bytes)
            reserved = int(done.reserved()[int(share * done.events) :].max())
            wrong += _add(found, f"the model against itself: {one.name}, from {share:.0%}", compared, reserved, differ)
    return wrong


def written_down(done: Replay, begin: float = 0.0) -> tuple[AllocatorEvents, Segments]:
    """Returns the model's actions in the form of a recording.

    Args:
        done: Its actions.
        begin: Share of the events that were over when the recording began.
    """
    requests = done.requests
    at: dict[int, list[SegmentEvent]] = {}
    for happened in done.segment_events:
        at.setdefault(happened.event, []).append(happened)
    rows: list[tuple[str, int, int]] = []
    before: dict[int, tuple[str, int, int]] = {}
    first = int(begin * done.events)
    for event in range(done.events):
        kind, allocation = int(requests.kind[event]), int(requests.allocation[event])
        address, size = int(done.address[allocation]), int(requests.size[allocation])
        if event < first:
            before[address] = ("alloc", address, size)
            if kind == FREE:
                del before[address]
            continue
        rows += [(one.action, one.address, one.size) for one in at.get(event, ())]  # right before what they are for
        rows += [("alloc", address, size)] if kind == ALLOCATE else [("free_requested", address, size)]
        rows += [("free_completed", address, size)] if kind == FREE else []
    action, address, size = zip(*before.values(), *rows, strict=True)
    index = [*[NONE] * len(before), *range(len(rows))]
    events = AllocatorEvents.of(index=index, action=action, address=address, size_bytes=size)
    return events, _segments_of(done)


def _segments_of(done: Replay) -> Segments:
    """Writes the segments as they are after the last event."""
    segments = list(done.allocator.segments.values())
    tiled = [list(segment.blocks()) for segment in segments]
    return Segments.of(
        address=[blocks[0].address for blocks in tiled],
        total_size_bytes=[sum(block.size for block in blocks) for blocks in tiled],
        active_size_bytes=[sum(block.size for block in blocks if block.state != BLOCK_FREE) for blocks in tiled],
        allocated_size_bytes=[sum(block.size for block in blocks if block.state == ALLOCATED) for blocks in tiled],
        segment_type=["small" if segment.pool.is_small else "large" for segment in segments],
    )


def _add(found: Found, name: str, compared: Comparison, recorded: int, differ: int) -> int:
    differ += recorded >= 0 and compared.reserved_peak != recorded
    found.add(
        (
            name,
            f"{compared.allocations:,}",
            f"{compared.segment_events:,}",
            f"{compared.blocks:,}",
            " or ".join(compared.fitting),
            f"{compared.reserved_peak:,}",
            f"{recorded:,}" if recorded >= 0 else "",
            str(differ),
        ),
        run=name,
        allocations=compared.allocations,
        segment_events=compared.segment_events,
        fitting=list(compared.fitting),
        is_complete=compared.is_complete,
        reserved_peak_bytes=compared.reserved_peak,
        recorded_reserved_peak_bytes=recorded,
        differ=differ,
        mismatches=[f"event {one.event}: {one.what}" for one in compared.mismatches[:_SHOWN]],
    )
    return differ
