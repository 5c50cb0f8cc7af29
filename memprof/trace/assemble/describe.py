"""Builds the manifest of an assembled process: who was recorded, where, and how completely."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from memprof.trace.assemble.memory.native_events import CPU
from memprof.trace.assemble.recording import Recording
from memprof.trace.files.private_file import describe_fault
from memprof.trace.files.spool import DRY_RUN, Spool
from memprof.trace.manifest import (
    RUNNING,
    UNFINISHED,
    Backend,
    Between,
    Capture,
    Communicators,
    LaterPeak,
    Machine,
    Manifest,
    Speed,
    Window,
    signal_name,
)
from memprof.trace.schema import NONE, SCHEMA_VERSION, Modules, Ops, Steps, Table

#: What became of a job that was attached to, by whether it went on.
_ATTACHED = {
    True: "the job was still running when this recording ended",
    False: "the job ended during this recording; its exit status is unknown, as another process started it",
}


@dataclass(frozen=True)
class JobRecords:
    """What there is of a process and its job besides the raw recording.

    Attributes:
        folder: The process's folder in the spool.
        launch: The launch record that the parent process wrote when it started the job.
        exit_record: The exit record that the parent wrote at the end; None while the job runs, empty where memprof was
            killed before it wrote one.
    """

    folder: Path
    launch: Mapping[str, Any]
    exit_record: Mapping[str, Any] | None

    @property
    def exit_status(self) -> int | None:
        """The job's exit status; None where it is not known."""
        return None if self.exit_record is None else self.exit_record.get("returncode")

    @cached_property
    def speed(self) -> Speed:
        """The machine's speed: measured on the device by the process if it did, else by the parent."""
        known = (self.exit_record or {}).get("speed", {})
        # The file is absent where no device was used, and useless when cut short.
        with contextlib.suppress(OSError, ValueError):
            known = json.loads((self.folder / "speed.json").read_text(encoding="utf-8"))
        try:
            return Speed.from_json(known if isinstance(known, dict) else {})
        except TypeError:
            return Speed()  # written by a version that measures other quantities

    def describe_end(self, otherwise: str = "") -> str:
        """Returns a clause on how a job ended whose recording was not closed.

        Args:
            otherwise: The clause for a job that was not killed, if its recording gives a reason.
        """
        if self.exit_record is None:
            return RUNNING
        if isinstance(self.exit_status, int) and self.exit_status < 0:
            return f"the job was killed by {signal_name(-self.exit_status)}"
        return otherwise or ("the job ended without leaving Python in order" if self.exit_record else UNFINISHED)


def build_manifest(
    recording: Recording, job: JobRecords, tables: Mapping[type[Table], Table], op_times: str, notes: tuple[str, ...]
) -> Manifest:
    """Builds the manifest of a recording with these tables."""
    spool, steps = recording.spool, cast(Steps, tables[Steps])
    start = spool.records["start"][0]
    common = describe_start(spool, job)
    usages: Mapping[str, Any] = next(reversed(spool.records.get("usages", [])), {})
    ended, rank = job.exit_record or {}, str(common.rank)
    later = [r for r in spool.records.get("later_peak", []) if r["device"] in (recording.memory_events.device, CPU)]
    same = ended.get("same_ranks", {}).get(rank, ())  # the ranks that it stands for, according to the parent
    host = replace(common.machine, threads=int(usages.get("threads", common.machine.threads)))
    return replace(
        common,
        machine=machine_of(spool, recording.memory_events.device, host),
        undivided=next(reversed(spool.records.get("batches", [])), ""),
        optimizers=tuple(usages.get("optimizers", ())),
        usages=tuple(usages.get("seen", ())),
        backend=backend_of(recording),
        same_ranks=tuple(int(other) for other in same if other != common.rank),
        between=Between.from_json(ended.get("between", {}).get(rank, {})),
        communicators=Communicators.from_json(ended.get("communicators", {}).get(rank, {})),
        capture=_capture(spool, job, steps, cast(Ops, tables[Ops]), cast(Modules, tables[Modules])),
        window=Window(**start["window"]),
        later=LaterPeak.from_json(next(reversed(later), {})),
        op_times=op_times,
        notes=(
            *((str(ended["killed"]),) if "killed" in ended else ()),
            *((_ATTACHED[ended["is_running"]],) if "is_running" in ended else ()),
            *_step_notes(spool, steps),
            *notes,
            *ended.get("without_effect", ()),
        ),
    )


def describe_start(spool: Spool, job: JobRecords) -> Manifest:
    """Returns what the manifest of any recording says about the process, and about the machine as a host."""
    start = spool.records["start"][0]
    host, options = start["machine"], job.launch.get("options", {})
    return Manifest(
        schema_version=SCHEMA_VERSION,
        memprof_version=start["memprof_version"],
        torch_version=start["torch_version"],
        torch_pin=str(options.get("torch_pin", "")),
        python_version=start["python_version"],
        created_us=start["time_ns"] / 1000,
        command=tuple(str(part) for part in job.launch.get("command", start["argv"])),
        target=str(job.launch.get("target", start["argv"][0] if start["argv"] else "")),
        machine=Machine(
            device_name=host["device_name"],
            device_kind=host["device_kind"],
            cores=host["cores"],
            memory_bytes=host["memory_bytes"],
            capacity_bytes=host["memory_bytes"],
            os=host["os"],
            allocator_settings=host.get("allocator_settings", ""),
            short_types=tuple(host.get("short_types", Machine.short_types)),
            has_amx=bool(host.get("has_amx", False)),
            threads=int(start.get("threads", Machine.threads)),
            speed=job.speed,
        ),
        rank=start["rank"],
        world_size=start["world_size"],
        budget_bytes=options.get("budget_bytes"),
        dry_ranks=int(options.get("ranks", 0)),
        dry_nodes=int(options.get("nodes", 1)),
        pid=start["pid"],
        node=start.get("node", ""),
        clock=start.get("clock", ""),
        plan=next(reversed(spool.records.get("plan", [])), None),
    )


def machine_of(spool: Spool, device: str, host: Machine) -> Machine:
    """Returns a machine with the device that was recorded."""
    if device == CPU:
        return host
    known = {record["device"]: record for record in spool.records.get("device", [])}.get(device, {})
    kind = known.get("kind", device.partition(":")[0])
    return replace(
        host,
        device_name=known.get("name", device),
        device_kind="cuda" if kind == "rocm" else kind,
        capacity_bytes=known.get("capacity_bytes", 0),
        driver=known.get("driver", ""),
        cudnn=known.get("cudnn", ""),
        cuda=f"ROCm {known['cuda']}" if kind == "rocm" else known.get("cuda", ""),
    )


def _step_notes(spool: Spool, steps: Steps) -> list[str]:
    notes = []
    members = max((record["members"] for record in spool.records.get("steps", [])), default=1)
    if members > 1:
        notes.append(f"a step is one round of {members} optimizers: each has updated at least once")
    known = steps.first_op_id != NONE
    if known.any() and not (steps.kind[known] == "recorded").any():
        window = spool.records["start"][0]["window"]
        notes.append(f"the job ended before step {window['skip']}: only warm-up steps were recorded (see --skip)")
    return notes


def _capture(spool: Spool, job: JobRecords, steps: Steps, ops: Ops, modules: Modules) -> Capture:
    end = spool.records.get("end", [])
    is_whole = bool(((steps.kind == "recorded") & steps.is_complete & (steps.first_op_id != NONE)).any())
    window = spool.records["start"][0]["window"]
    wanted = int(((steps.kind == "recorded") & steps.is_complete).sum()) >= window["steps"]
    if end and is_whole and wanted:
        return Capture(is_complete=True, reason=end[0]["reason"], exit_status=job.exit_status)
    if spool.records.get("faults"):
        reason = describe_fault(spool.records["faults"][0])
    elif spool.records.get("fatal"):
        reason = "memory ran out"
    elif end:
        reason = end[0]["reason"]
    else:
        reason = job.describe_end()
    return Capture(is_complete=False, ends_at=_place(ops, modules), reason=reason, exit_status=job.exit_status)


def _place(ops: Ops, modules: Modules) -> str:
    if not len(ops):
        return ""
    module = int(ops.module_id[-1])
    where = f" of {modules.name[module] or modules.type[module]}" if module != NONE else ""
    return f"step {int(ops.step[-1])}, {ops.phase[-1]}{where}"


_BACKENDS = {
    "cpu-native": Backend(
        name="cpu-native",
        sees=(
            "every allocation of torch's CPU allocator on the training thread, temporaries inside kernels included",
            "every operator of the training thread",
        ),
        blind_spots=(
            "allocations on other threads of the job",
            "memory that torch's allocator does not own (numpy, shared memory, libraries' own workspaces)",
            "kernels of compiled regions that allocate in C++ (cpp_wrapper); their memory is seen",
        ),
    ),
    "cpu-dispatch": Backend(
        name="cpu-dispatch",
        sees=("every storage that an operator of the training thread returns, by weak references",),
        blind_spots=(
            "temporaries inside kernels",
            "memory taken outside operators, and in compiled regions that allocate in C++ (cpp_wrapper)",
            "allocations on other threads of the job",
        ),
    ),
    "cpu-dry-run": Backend(
        name="dry-run",
        sees=("the shape of every storage that an operator of the training thread would return",),
        blind_spots=(
            "temporaries inside kernels",
            "memory taken outside operators",
            "what depends on values: nothing was computed",
        ),
    ),
    "device-dry-run": Backend(
        name="dry-run",
        sees=(
            "every block that torch's caching allocator would allocate, by the rules of the device's architecture",
            "kernel workspaces, where torch's sources determine them",
        ),
        blind_spots=(
            "workspaces that a library chooses at run time are estimates, unless the library was asked",
            "memory that torch's allocator does not own: a rule for the context, nothing for NCCL",
            "what depends on values: nothing was computed",
        ),
    ),
    "device-native": Backend(
        name="",
        sees=(
            "every block that torch's caching allocator allocates, with its size and its requested bytes",
            "temporaries inside kernels, and the bytes allocated and reserved, as the allocator counts them",
            "every operator of the training thread and of its backward",
        ),
        blind_spots=(
            "memory that torch's allocator does not own (the context, NCCL, libraries' own), but for its sum",
            "Triton kernels inside compiled regions, and operators of replayed graphs; their memory is seen",
            "host memory of the job but for its sum",
        ),
    ),
    "device-history": Backend(
        name="",
        sees=(
            "every entry of the allocator's own history; blocks are as large as it rounds sizes",
            "every operator of the training thread and of its backward",
        ),
        blind_spots=(
            "how much larger a block is than its size rounded up",
            "memory that torch's allocator does not own (the context, NCCL, libraries' own)",
            "Triton kernels inside compiled regions, and operators of replayed graphs; their memory is seen",
        ),
    ),
    "device-dispatch": Backend(
        name="",
        sees=("every storage on the device that an operator of the training thread returns, by weak references",),
        blind_spots=(
            "temporaries inside kernels, and workspaces of libraries",
            "what the allocator rounds up and reserves: this device's keeps no history",
            "memory taken outside operators, and in compiled regions that allocate in C++ (cpp_wrapper)",
        ),
    ),
}


def backend_of(recording: Recording) -> Backend:
    """Returns the source of a recording's memory events, with its blind spots."""
    memory_events = recording.memory_events
    if memory_events.device == CPU:
        return _BACKENDS[f"cpu-{recording.epoch.source}"]
    if recording.epoch.source == DRY_RUN:
        return _BACKENDS["device-dry-run"]
    is_known = recording.epoch.source == "native" and bool(
        (memory_events.total >= 0).any() or not len(memory_events.total)
    )
    way = "native" if is_known else "history" if len(memory_events.history) else "dispatch"
    return replace(_BACKENDS[f"device-{way}"], name=f"{memory_events.device.partition(':')[0]}-{way}")
