"""What each source of memory events covers, and its blind spots."""

from __future__ import annotations

from dataclasses import replace

from memprof.trace.assemble.memory.native_events import CPU
from memprof.trace.assemble.recording import Recording
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import Backend

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
