"""``memprof record`` of jobs that really run out of memory, at every place where a job can."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from memprof.analysis.out_of_memory.post_mortem import examine
from memprof.analysis.plans.partial_step import examine_partial
from memprof.cli.main import main
from memprof.launch.outcome.memory_end import KillerWatch
from memprof.launch.parent.recorded_job import begin_recording, finish_recording
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import Target
from memprof.machines.host_limits import HostLimit
from memprof.trace.schema import Ops, OutOfMemory
from memprof.trace.store import Trace
from tests.conformance.test_conformance import OUT_OF_MEMORY
from tests.trace.assemble.conftest import RawJob
from tests.trace.assemble.test_process import linear_step

SCRIPT = Path(__file__).parent.parent / "conformance" / "scripts" / "runs_out_of_memory.py"
#: A weight of the script's model, in bytes, and its bias.
WEIGHT, BIAS = 3072 * 3072 * 4, 3072 * 4
PARAMETERS = 2 * (WEIGHT + BIAS)
#: Exit status, memprof's own lines, and the file, of the script made to run out of memory at a place.
Recorded = Callable[[str], tuple[int, list[str], Path]]
#: What an optimizer's step runs on its way out, error or not.
RANGE_END = "profiler._record_function_exit._RecordFunction"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Records the script at a place, once; returns what memprof said and the file."""

    @cache
    def run(place: str) -> tuple[int, list[str], Path]:
        folder = tmp_path_factory.mktemp(place)
        options = ("-o", "run.memprof", "--skip", "1", "--steps", "2")
        done = subprocess.run(
            [sys.executable, "-P", "-m", "memprof.cli.main", "record", *options, str(SCRIPT), place],
            cwd=folder,
            # What a thread of the profiler's library leaves to malloc would serve 36 MiB beyond the limit.
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        said = [line for line in done.stderr.splitlines() if line.startswith("memprof: ")]
        return done.returncode, said, folder / "run.memprof"

    return run


@pytest.mark.parametrize(
    "place",
    [
        *("forward", "backward", "optimizer"),
        *(pytest.param(place, marks=pytest.mark.slow) for place in ("first", "handled", "chained")),
    ],
)
def test_recording_is_whole_up_to_the_request(recorded: Recorded, place: str) -> None:
    """The operator that asked is the last of the recording; what was held then sums up to the allocator's own count."""
    status, said, path = recorded(place)
    assert status == OUT_OF_MEMORY[place]
    trace = Trace.open(path)
    failures, ops = trace.table(OutOfMemory), trace.table(Ops)
    assert len(failures) == 1
    assert not failures.is_caught[0]
    assert set(ops.name[failures.op_id[0] + 1 :]) <= {RANGE_END}
    assert failures.name[0] == ops.name[failures.op_id[0]]
    assert failures.phase[0] == {"first": "forward", "handled": "backward", "chained": "backward"}.get(place, place)
    assert failures.requested_bytes[0] == (2 * WEIGHT if place == "forward" else WEIGHT)
    assert 0 <= failures.free_bytes[0] < failures.requested_bytes[0]
    trace.step(0).check()
    found = examine(trace)
    assert found is not None
    assert found.held is not None
    if place != "first":  # before the first event the allocator has reported no count
        assert found.held.total_bytes == failures.allocated_bytes[0]
    assert found.held.category_bytes("parameter") == PARAMETERS
    for split in (found.held.by_category, found.held.by_module):
        assert sum(part.bytes for part in split.parts) == found.held.total_bytes
    assert said[0].startswith(f"memprof: out of memory: {failures.name[0]} requested ")
    assert found.source is not None
    assert found.source.place.startswith("runs_out_of_memory.py:")
    assert found.source.place in said[0]


@pytest.mark.slow
def test_what_was_still_to_come(recorded: Recorded) -> None:
    """In forward, gradients and Adam's moments and steps are reported as pending; in the update only the state."""
    state = 2 * PARAMETERS + 4 * 4
    forward = examine(Trace.open(recorded("forward")[2]))
    assert forward is not None
    assert (forward.gradients_missing_bytes, forward.state_missing_bytes) == (PARAMETERS, state)
    update = examine(Trace.open(recorded("optimizer")[2]))
    assert update is not None
    assert update.held is not None
    assert update.held.category_bytes("gradient") == PARAMETERS
    assert (update.gradients_missing_bytes, update.state_missing_bytes) == (0, state - 4)  # one step is there already


def test_next_commands_are_told(recorded: Recorded) -> None:
    """Where no step was whole, and on no device that a dry run simulates: what finds a plan by itself."""
    _, said, _ = recorded("backward")
    assert said[-1].startswith("memprof: next: memprof fit --budget ")
    assert said[-1].endswith("runs_out_of_memory.py backward")


def test_job_that_goes_on_has_one_line(recorded: Recorded) -> None:
    """A job that halves its batch until it fits ends well; memprof says in one line that memory ran out."""
    status, said, path = recorded("retried")
    assert status == 0
    assert said[0].startswith("memprof: memory ran out 3 times and the job continued; ")
    assert said[1].startswith("memprof: recorded 2 steps")
    assert len(said) == 3
    assert Trace.open(path).table(OutOfMemory).is_caught.all()


def test_request_after_the_window(recorded: Recorded) -> None:
    """An error after the recording is reported by its traceback, without live bytes."""
    status, said, path = recorded("late")
    assert status == 1
    first = "memprof: out of memory: the job requested 36.00 MiB on cpu in step 5, runs_out_of_memory.py:"
    assert said[0].startswith(first)
    found = examine(Trace.open(path))
    assert found is not None
    assert (found.held, found.has_whole_step, found.requested_bytes) == (None, True, WEIGHT)


def test_model_that_cannot_be_built(recorded: Recorded) -> None:
    """Without a recording the parent still reports the request and its line."""
    status, said, path = recorded("build")
    assert status == 1
    assert not path.exists()
    assert said[0].startswith("memprof: out of memory before a training step was recorded: 36.00 MiB requested on cpu")
    assert "runs_out_of_memory.py:" in said[0]


def test_suggest_says_what_it_knows(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    """From part of a step: no plan, exit status 3, the least that the whole needs, and what certainly cannot fit."""
    _, _, path = recorded("forward")
    assert main(["suggest", str(path), "--budget", "100MiB", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["conclusive"] is False
    assert told["update_bytes"] == PARAMETERS + PARAMETERS + 2 * PARAMETERS + 16
    assert told["least_peak_bytes"] >= told["update_bytes"]
    assert told["largest_batch"] in (0, None)
    assert main(["suggest", str(path), "--budget", "100MiB"]) == 3
    page = capsys.readouterr().out
    assert "No batch fits 100.00 MiB without a plan" in page
    assert "next: memprof fit --budget 100.00MiB " in page
    whole = Trace.open(recorded("retried")[2])
    true_peak = int(whole.steady_step().memory.allocated_bytes.max())
    assert examine_partial(Trace.open(path)).update_bytes <= true_peak


def test_report_shows_it_first(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    """`memprof report` begins with it, and its JSON has every figure."""
    _, said, path = recorded("backward")
    assert main(["report", str(path)]) == 0
    assert said[0].removeprefix("memprof: ") in capsys.readouterr().out.splitlines()[1]
    assert main(["report", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["out_of_memory"]
    assert told["requested_bytes"] == WEIGHT
    assert sum(told["held"]["by_category"].values()) == told["held"]["bytes"] == told["allocated_bytes"]


def test_shared_memory_full_before_a_step(tmp_path: Path) -> None:
    """A job whose first batch finds /dev/shm full has nothing recorded; the reason is said once."""
    told = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
    (tmp_path / "job.py").write_text(f"import torch\ntorch.nn.Linear(2, 2)\nraise RuntimeError({told!r})\n")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "memprof.cli.main", "record", "job.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("memprof: ")]
    assert said[0].startswith("memprof: out of memory: /dev/shm was full: batches of loader workers lie there.")
    assert said[1].startswith("memprof: nothing was recorded: ")


def test_killed_by_the_kernel(tmp_path: Path) -> None:
    """A job killed while it held nearly all it may have was killed for that; one far from it, or ended else, not."""
    lines = [
        json.dumps(
            {"pid": pid, "role": role, "rss_bytes": size << 20, "anonymous_bytes": size << 20, "time_us": float(time)}
        )
        for time, (pid, role, size) in enumerate(
            [(1, "trainer", 600), (2, "worker", 300), (1, "trainer", 700), (2, "worker", 250), (1, "trainer", 10)]
        )
    ]
    (tmp_path / "host.jsonl").write_text("\n".join([*lines, '{"pid": 1, "rss']))
    near, far = (KillerWatch(None, HostLimit(size << 30, 0)) for size in (1, 2))
    said = near.describe(tmp_path, -signal.SIGKILL)
    assert said.startswith(
        "out of memory: the kernel probably killed the job (SIGKILL); its processes held 1000.00 MiB"
    )
    assert "at most: trainer 700.00 MiB, worker 300.00 MiB." in said
    assert near.describe(tmp_path, 128 + signal.SIGKILL) == said
    assert near.describe(tmp_path, 1) == ""
    assert far.describe(tmp_path, -signal.SIGKILL) == (
        "the job was killed (SIGKILL), without a sign that memory had run out: no limit was near. Its processes held "
        "1000.00 MiB at most: trainer 700.00 MiB, worker 300.00 MiB."
    )
    counted = KillerWatch(-1, HostLimit(2 << 30, 0))
    assert counted.describe(tmp_path, 1).startswith(
        "out of memory: the kernel killed a process while the job ran, such as one of its workers (SIGKILL); its"
    )
    assert counted.describe(tmp_path, 0) == ""


def test_killed_by_the_kernel_with_little_known(tmp_path: Path) -> None:
    """Without kinds the resident bytes are told; without a sample, that the kernel killed the job and no more."""
    (tmp_path / "host.jsonl").write_text('{"pid": 1, "role": "trainer", "rss_bytes": 1048576000, "time_us": 1.0}\n')
    near = KillerWatch(None, HostLimit(1 << 30, 0))
    start = "out of memory: the kernel probably killed the job (SIGKILL)"
    assert near.describe(tmp_path, -signal.SIGKILL) == (
        f"{start}; its processes held 1000.00 MiB of the 1.00 GiB it may have at most. "
        "Host memory ran out, not torch's allocator."
    )
    (tmp_path / "host.jsonl").unlink()
    assert near.describe(tmp_path, -signal.SIGKILL) == ""
    assert KillerWatch(-1, None).describe(tmp_path, -signal.SIGKILL) == (
        "out of memory: the kernel killed the job (SIGKILL). Host memory ran out, not torch's allocator."
    )


def test_a_kill_by_the_kernel_is_told_once_and_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In record's summary, where the recording has it too, and in report's first lines."""
    output = tmp_path / "run.memprof"
    begun = begin_recording(Target(("python", "train.py"), "train.py"), Settings(output=output))
    job = RawJob(begun.spool / "process-11")
    linear_step(job)
    job.write()
    (begun.spool / "host.jsonl").write_text('{"pid": 11, "role": "trainer", "rss_bytes": 1048576000, "time_us": 1.0}\n')
    near = KillerWatch(None, HostLimit(1 << 30, 0))
    done = finish_recording(replace(begun, killer=near), -signal.SIGKILL)
    assert done.was_killed
    killed = "out of memory: the kernel probably killed the job (SIGKILL); its processes held 1000.00 MiB"
    assert str(done.verdict).startswith(f"memprof: {killed}")
    assert str(done.verdict).count("the kernel") == 1
    assert main(["report", str(output)]) == 0
    said = capsys.readouterr().out
    assert said.count(killed) == 1
    assert next(line for line in said.splitlines() if "warning: " in line).startswith(f"warning: {killed}")
