"""Measures the true peak between optimizer updates of a script, as the CPU allocator itself counts.

An independent second opinion on recorded peaks. No profiler, no dispatch mode and nothing of memprof takes
part: torch's CPU allocator has a switch (``FLAGS_caffe2_report_cpu_memory_usage``) that makes it write every
allocation of every thread, with its running total, to stderr. A global optimizer hook writes a line in
between at every update (in scripts without an optimizer: a module hook at every outermost call), and the highest
total between two such lines is the true peak.

    python tests/truth.py train.py --steps 12

prints one JSON object; ``measure`` is the same from Python.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_LINE = re.compile(rb"total alloc (\d+) bytes|memprof-truth mark (\d+)")


@dataclass(frozen=True)
class Update:
    """What the allocator counted from the end of one optimizer update to the end of the next.

    Attributes:
        optimizer: Which optimizer made the update (or which module was called), numbered in order of appearance.
        peak_bytes: Highest value of the allocator's counter, the value at the start included.
        end_bytes: The counter's value when the update was done.
        events: Allocations and frees in between.
    """

    optimizer: int
    peak_bytes: int
    end_bytes: int
    events: int


@dataclass(frozen=True)
class Truth:
    """The allocator's counts over a whole run.

    Attributes:
        updates: One entry for every optimizer update, in order.
        rest_peak_bytes: Highest value after the last update (the whole run's where there was none).
        returncode: The script's exit status.
        stdout: What the script printed.
    """

    updates: tuple[Update, ...]
    rest_peak_bytes: int
    returncode: int
    stdout: bytes

    def peak_bytes(self, first: int, count: int) -> int:
        """Returns the highest value of the counter in ``count`` updates from number ``first`` on."""
        return max(update.peak_bytes for update in self.updates[first : first + count])


def measure(
    script: str | Path,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    mark: str = "update",
) -> Truth:
    """Runs a script in a separate process and reads the allocator's log.

    Args:
        script: Path of the Python script.
        arguments: Its arguments.
        environment: Environment of the process; the caller's own by default.
        mark: Where to cut: at every optimizer ``update``, at every ``call`` of an outermost module that has
            parameters, or ``never``.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--inside", mark, str(script), *arguments]
    with tempfile.TemporaryFile() as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, env=environment, check=False)
        log.seek(0)
        updates, rest = read_log(log.read())
    return Truth(updates, rest, done.returncode, done.stdout)


def read_log(log: bytes) -> tuple[tuple[Update, ...], int]:
    """Cuts the allocator's log at the optimizer updates; returns them and the peak after the last."""
    updates = []
    total = peak = events = 0
    for match in _LINE.finditer(log):
        if match[2] is None:
            total = int(match[1])
            peak = max(peak, total)
            events += 1
        else:
            updates.append(Update(int(match[2]), peak, total, events))
            peak, events = total, 0
    return tuple(updates), peak


def _run_logged(mark: str, script: str, arguments: Sequence[str]) -> None:
    """Runs the script in this process with the allocator's log switched on."""
    import torch

    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    report = ctypes.c_bool.in_dll(libc10, "FLAGS_caffe2_report_cpu_memory_usage")
    level = ctypes.c_int.in_dll(libc10, "FLAGS_caffe2_log_level")

    def silence() -> None:
        report.value = False

    # A forked DataLoader worker counts in a copy of the counter and writes to the same stderr.
    os.register_at_fork(after_in_child=silence)
    if mark == "update":
        _mark_updates()
    elif mark == "call":
        _mark_calls()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    report.value, level.value = True, 0
    runpy.run_path(script, run_name="__main__")


def _mark_updates() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    numbers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def write(optimizer: object, *_: object) -> None:
        os.write(2, b"memprof-truth mark %d\n" % numbers.setdefault(optimizer, len(numbers)))

    register_optimizer_step_post_hook(write)


def _mark_calls() -> None:
    import torch
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    numbers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
    depth = 0

    def enter(module: torch.nn.Module, _: object) -> None:
        nonlocal depth
        if depth == 0 and any(True for _ in module.parameters()):  # a loss is no model
            os.write(2, b"memprof-truth mark %d\n" % numbers.setdefault(module, len(numbers)))
        depth += 1

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1

    register_module_forward_pre_hook(enter)
    register_module_forward_hook(leave, always_call=True)


def main(arguments: Sequence[str]) -> None:
    """Measures the script named on the command line and prints the result as JSON."""
    if not arguments:
        raise SystemExit("usage: python tests/truth.py script.py [arguments]")
    if arguments[0] == "--inside":
        _run_logged(arguments[1], arguments[2], arguments[3:])
        return
    truth = measure(arguments[0], arguments[1:])
    print(json.dumps(asdict(truth) | {"stdout": truth.stdout.decode(errors="replace")}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
