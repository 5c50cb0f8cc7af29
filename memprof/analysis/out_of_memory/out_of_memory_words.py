"""The post-mortem of a job that ran out of memory, in sentences."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from memprof.analysis.out_of_memory.post_mortem import Held, PostMortem
from memprof.analysis.report.breakdown import Breakdown
from memprof.analysis.report.sources import SourceLine
from memprof.analysis.report.table_rows import LargeStorage
from memprof.machines.card import architecture_of
from memprof.machines.catalogue import machine_of_device
from memprof.trace.manifest import Manifest
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.analysis.out_of_memory.room import Room

_PARTS = 5


def describe_post_mortem(found: PostMortem) -> list[str]:
    """Returns the post-mortem in sentences, the verdict first."""
    if found.is_caught:
        return [describe_caught(found)]
    lines = [describe_failure(found)]
    if found.held is not None:
        lines += _held(found.held, found.device)
    else:
        lines.append("Live memory is unknown: no operators of the failing step were recorded.")
    lines += [*_room(found), *_still_to_come(found)]
    return lines


def describe_failure(found: PostMortem) -> str:
    """Describes the failed request: who requested how much, and where."""
    requested = "more memory" if found.requested_bytes is None else format_bytes(found.requested_bytes)
    who = found.op or "the job"
    rank = f" in rank {found.rank}" if found.rank else ""
    others = f" {found.failures - 1} earlier {_requests(found.failures - 1)} had failed and were caught."
    return (
        f"out of memory{rank}: {who} requested {requested} on {found.device}{_place(found)}."
        f"{others if found.failures > 1 else ''}"
    )


def describe_caught(found: PostMortem) -> str:
    """Returns one line saying that memory ran out and the job continued."""
    requested = "" if found.requested_bytes is None else f" of {format_bytes(found.requested_bytes)}"
    times = "once" if found.failures == 1 else f"{found.failures} times"
    return (
        f"memory ran out {times} and the job continued; last when {found.op or 'it'} requested "
        f"{requested.removeprefix(' of ') or 'more'} on {found.device}{_place(found)}."
    )


def next_steps(found: PostMortem, trace: str, manifest: Manifest, size: str = "") -> list[tuple[str, str]]:
    """Returns the commands that lead to a plan, each with its reason.

    Args:
        found: The post-mortem.
        trace: The recording, as the user named it.
        manifest: Its manifest.
        size: The budget; "" for what torch could have used there, or 80 % of the peak where that is unknown.
    """
    from memprof.analysis.plans.another_plan import unused_file  # most reports need no predictions
    from memprof.analysis.plans.predict import words_for_record

    limit = f"--budget {size}" if size else ""
    size = size or ("80%" if found.room_bytes is None else format_bytes(found.room_bytes).replace(" ", ""))
    suggest, plan = f"memprof suggest {shlex.quote(trace)}", unused_file("plan", ".toml")
    job = words_for_record(manifest)
    if found.is_caught:
        return [(f"{suggest} --budget {size}", "plans that make it fit")]
    if found.has_whole_step:
        train = (f"memprof record --plan {plan} {job}", "train under it")
        return [(f"{suggest} --budget {size} --write {plan}", "plans that make it fit"), train]
    whole, device = whole_step_command(manifest)
    if not whole:
        return [(f"memprof fit --budget {size} {job}", "runs the job until a plan is measured to fit")]
    return [
        (whole, "a whole step on the simulated device, which does not run out"),
        (f"memprof suggest whole.memprof {limit or f'--device {device}'} --write {plan}", "plans that make it fit"),
    ]


def whole_step_command(manifest: Manifest) -> tuple[str, str]:
    """Returns the command that records the job on its device, simulated: memory does not run out; and the device.

    Both are "" where the device is unknown.
    """
    from memprof.analysis.plans.predict import words_for_record  # most reports need no predictions

    machine = machine_of_device(manifest.machine.device_name)
    if machine is None or not manifest.command or architecture_of(machine.capability) is None:
        return "", ""
    device = machine.name.lower().replace(" ", "")
    return f"memprof record --dry-run --device {device} -o whole.memprof {words_for_record(manifest)}", device


def describe_free(found: PostMortem) -> str:
    """Returns how much of a GPU was free when a request failed, a sentence; "" where unknown."""
    if found.device == "cpu" or found.total_bytes is None or found.free_bytes is None:
        return ""
    elsewhere = found.total_bytes - found.free_bytes - (found.reserved_bytes or 0)
    more = f"; {format_bytes(elsewhere)} are held outside torch's allocator" if elsewhere > 0 else ""
    return f"{found.device} has {format_bytes(found.total_bytes)}, {format_bytes(found.free_bytes)} of it free{more}."


def _place(found: PostMortem) -> str:
    module = f" of {found.module}" if found.module is not None else ""
    parts = [
        f" in step {found.step}" if found.step is not None else "",
        f", {found.phase}{module}" if found.phase else "",
        f", {found.source.place}" if found.source is not None else "",
    ]
    return "".join(parts)


def _requests(number: int) -> str:
    return "request" if number == 1 else "requests"


def _held(held: Held, device: str) -> list[str]:
    names = {part.key: held.tree.title(part.key) for part in held.by_module.parts if part.key is not None}
    lines = [
        f"{format_bytes(held.total_bytes)} were allocated on {device}:",
        f"  by category: {_sum(held.by_category, {})}",
        f"  by module: {_sum(held.by_module, names)}",
        f"  by line: {_lines(held.by_source)}",
    ]
    if all(part.key is None for part in held.by_module.parts):
        del lines[2]  # an imported snapshot has no modules
    return lines + [f"  {_large(one)}" for one in held.largest]


def _sum(split: Breakdown[str] | Breakdown[int], names: dict[int, str]) -> str:
    """Formats a split: the largest parts, and the rest as one."""
    parts, rest, count = split.top(_PARTS)
    texts = [f"{format_bytes(part.bytes)} {_name(part.key, names)}" for part in parts]
    if rest is not None:
        texts.append(f"{format_bytes(rest.bytes)} in {count} others")
    return " + ".join(texts)


def _lines(split: Breakdown[SourceLine]) -> str:
    """Formats a split by line as ``_sum`` does."""
    parts, rest, count = split.top(_PARTS)
    texts = [f"{format_bytes(part.bytes)} {part.key.place if part.key else 'no line known'}" for part in parts]
    return " + ".join([*texts, *([f"{format_bytes(rest.bytes)} in {count} others"] if rest is not None else [])])


def _name(key: str | int | None, names: dict[int, str]) -> str:
    if key is None:
        return "outside modules"
    return names[key] if isinstance(key, int) else key.replace("_", " ")


def _large(one: LargeStorage) -> str:
    shape = f" {one.shape} {one.dtype}" if one.shape else ""
    what = f" {one.name}" if one.name else ""
    made = f" allocated by {one.op}" if one.op else ("" if one.name else " allocated before the step")
    module = f" of {one.module_title}" if one.module_title is not None and not one.name else ""
    source = f", {one.source.place}" if one.source is not None else ""
    return f"{format_bytes(one.allocated_bytes)} {one.category.replace('_', ' ')}{what}{shape}{made}{module}{source}"


def _room(found: PostMortem) -> Iterable[str]:
    """Describes the available memory: in the allocator's segments, and on the device or within the limit."""
    if found.room is not None:
        yield from _whole_device(found.room)
        return
    if found.cached_bytes is not None and found.reserved_bytes is not None:
        cached, reserved = format_bytes(found.cached_bytes), format_bytes(found.reserved_bytes)
        largest = found.largest_free_bytes
        piece = "" if largest is None else f", the largest block {format_bytes(largest)}"
        if found.is_fragmented:
            yield (
                f"This is fragmentation: {cached} of the {reserved} reserved were free{piece}. With "
                "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.9) segments grow "
                "instead."
            )
        else:
            yield f"Not fragmentation: of the {reserved} reserved, {cached} were free{piece}."
    if found.total_bytes is None or found.free_bytes is None:
        return
    free, total = format_bytes(found.free_bytes), format_bytes(found.total_bytes)
    if found.device != "cpu":
        yield describe_free(found)
    elif found.machine_bytes and found.total_bytes < found.machine_bytes:
        yield f"The process is limited to {total} (ulimit -v, or its container's limit); {free} of it was free."
    else:
        yield f"The machine has {total}; {free} of it was available."


def _whole_device(room: Room) -> Iterable[str]:
    """Describes where all of the device's memory was, and what would have made the request fit."""
    largest = format_bytes(room.largest_hole_bytes)
    parts = [
        f"{format_bytes(room.used_bytes)} in use",
        f"{format_bytes(room.scattered_bytes)} cached and scattered (largest piece {largest})",
        f"{format_bytes(room.idle_bytes)} cached and usable",
        f"{format_bytes(room.free_bytes)} free",
    ]
    if room.outside_bytes is not None:
        parts.append(
            f"{format_bytes(room.outside_bytes)} outside torch's allocator (contexts, libraries, other processes)"
        )
    whole = "what torch could use" if room.total_bytes is None else "the device"
    total = room.used_bytes + room.scattered_bytes + room.idle_bytes + room.free_bytes + (room.outside_bytes or 0)
    yield f"{format_bytes(total)} is {whole}: {' + '.join(parts)}."
    setting = "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.9)"
    if room.fits_after_empty_cache:
        yield "The request fits in what is free once torch.cuda.empty_cache() has run."
    elif room.is_fragmented:
        yield f"This is fragmentation: with {setting} the same requests fit, the failed one included (replayed)."
    elif room.fits_expandable:
        yield f"With {setting} the same requests fit (replayed), by little: nearly all memory was in use."
    elif room.short_bytes:
        yield (
            f"Not fragmentation: {format_bytes(room.short_bytes)} are missing even with all that is free in one piece."
            " Neither empty_cache() nor expandable segments would have made it fit: less must be in use."
        )
    elif room.fits_expandable is None:
        yield "Expandable segments were in use already, and empty_cache() would not have made it fit."
    else:
        yield "Neither empty_cache() nor expandable segments (replayed) would have made it fit: less must be in use."


def _still_to_come(found: PostMortem) -> Iterable[str]:
    """Describes the memory the rest of the step would have needed."""
    texts = []
    if found.gradients_missing_bytes:
        texts.append(f"{format_bytes(found.gradients_missing_bytes)} of gradients")
    texts += [
        f"{format_bytes(optimizer.missing_bytes)} of {optimizer.name}'s state"
        for optimizer in found.optimizers
        if optimizer.missing_bytes
    ]
    if texts:
        yield f"Still to be allocated: {' and '.join(texts)}."
    unknown = [each.name for each in found.optimizers if each.full_bytes is None and not each.state_bytes]
    if unknown:
        yield f"The state size of {' and '.join(dict.fromkeys(unknown))} is unknown."
