"""The pytest plugin: memory limits for tests, and a fixture that records part of a test.

    @pytest.mark.limit_gpu_memory("2 GiB")
    @pytest.mark.limit_gpu_memory_increase("2%", baseline="memory.json")

Both work on CPU as well. A test over its limit fails as usual; nothing else fails because of the plugin.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memprof.errors import BadInputError, MemprofError, UsageError
from memprof.trace.files.reading import parse_json, read_text
from memprof.trace.files.whole_file import whole_file
from memprof.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memprof.analysis.diff.summary import Summary

_LIMIT, _INCREASE = "limit_gpu_memory", "limit_gpu_memory_increase"
#: The property that carries results from the worker process to the one that writes the table.
_PROPERTY = "memprof_peak"
_BASELINE = "memprof_baseline"
#: Records a whole test, however many steps it trains.
_ALL_STEPS = 2**31


@dataclass
class Recording:
    """The recording of a test.

    Attributes:
        path: The recording; missing if no torch operator ran.
        peak_bytes: Peak live bytes over all devices since recording started.
        place: The operator and line of the peak.
    """

    path: Path
    peak_bytes: int = 0
    place: str = ""

    @property
    def summary(self) -> Summary:
        """Summary of its step with the highest peak, by category, module, operator and line.

        Raises:
            BadInputError: No training step was recorded.
        """
        from memprof.analysis.diff.comparison import open_side

        return open_side(self.path)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("memprof", "memory of tests (memprof)")
    group.addoption("--memprof", action="store_true", help="list the peak memory of every test that was measured")
    group.addoption(
        "--memprof-update", action="store_true", help="write the peaks measured into the baselines, and fail for none"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers and the peak collector."""
    config.addinivalue_line("markers", f"{_LIMIT}(size): fail where the test takes more memory, such as '2 GiB'")
    config.addinivalue_line(
        "markers", f"{_INCREASE}(share, baseline): fail where it takes more than in the baseline, such as '2%'"
    )
    config.pluginmanager.register(_Peaks(config), "memprof-peaks")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Measures a test that has a limit, and fails it if the limit is exceeded."""
    limit, increase = item.get_closest_marker(_LIMIT), item.get_closest_marker(_INCREASE)
    if limit is None and increase is None:
        return (yield)
    mistake, bounds = "", []
    try:
        bounds = _bounds(item, limit, increase)
    except MemprofError as error:
        mistake = str(error)
    if mistake:
        pytest.fail(mistake, pytrace=False)
    with tempfile.TemporaryDirectory(prefix="memprof-pytest-") as folder, _recorded(Path(folder) / "t") as recording:
        result = yield
    item.user_properties.append((_PROPERTY, [recording.peak_bytes, recording.place]))
    for most, words in bounds:
        if recording.peak_bytes > most:
            place = f" in {recording.place}" if recording.place else ""
            over = format_bytes(recording.peak_bytes - most)
            pytest.fail(
                f"memory: the test's peak is {format_bytes(recording.peak_bytes)}{place}, {over} above {words}.",
                pytrace=False,
            )
    return result


@pytest.fixture
def memprof_recording(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Returns a context manager that records part of a test.

    After its block, ``peak_bytes`` and ``summary`` hold the measurement.
    """
    count = iter(range(_ALL_STEPS))

    @contextmanager
    def record() -> Iterator[Recording]:
        with _recorded(tmp_path / f"recording-{next(count)}.memprof") as recording:
            yield recording
        request.node.user_properties.append((_PROPERTY, [recording.peak_bytes, recording.place]))

    return record


@contextmanager
def _recorded(path: Path) -> Iterator[Recording]:
    """Records a block; fills in the recording when the block ends."""
    import memprof.launch.inline as inline

    recording = Recording(path)
    with _device_peak(recording):
        try:
            with inline.record(path, skip=0, steps=_ALL_STEPS, force=True):
                yield recording
        except BadInputError:
            return  # no torch operator ran: the peak is 0
    if path.exists():
        _read(recording)


@contextmanager
def _device_peak(recording: Recording) -> Iterator[None]:
    """Also takes the CUDA allocator's own peak into account, if there is one."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    devices = range(torch.cuda.device_count())
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    yield
    recording.peak_bytes = max(recording.peak_bytes, *(torch.cuda.max_memory_allocated(device) for device in devices))


def _read(recording: Recording) -> None:
    """Reads the peak over everything recorded, inside steps or not."""
    from memprof.analysis.report.sources import find_sources
    from memprof.replay.history import History
    from memprof.trace.schema import Ops, Stacks
    from memprof.trace.store import Trace

    trace = Trace.open(recording.path)
    history = History(trace)
    if not history.ops or int(history.total.max()) <= recording.peak_bytes:
        return
    op_id = history.peak()
    ops = trace.table(Ops)
    line = find_sources(trace.table(Stacks)).of_stack(int(ops.stack_id[op_id]))
    recording.peak_bytes = int(history.total[op_id])
    recording.place = str(ops.name[op_id]) + (f" at {line.place}" if line is not None else "")


def _bounds(item: pytest.Item, limit: pytest.Mark | None, increase: pytest.Mark | None) -> list[tuple[int, str]]:
    """Returns each marker's maximum bytes, with its description.

    Raises:
        UsageError: A marker is invalid, or its baseline is missing.
    """
    bounds = []
    if limit is not None:
        if len(limit.args) != 1 or not isinstance(limit.args[0], str | int):
            raise UsageError(f"{_LIMIT} takes one size, such as '2 GiB', not {limit.args!r}.")
        size = parse_bytes(str(limit.args[0]))
        bounds.append((size, f"its limit of {format_bytes(size)}"))
    if increase is not None:
        share, baseline = _increase_of(*increase.args, **increase.kwargs)
        path = Path(item.config.rootpath) / baseline
        item.user_properties.append((_BASELINE, str(path)))
        if not item.config.getoption("--memprof-update"):
            known = _baseline_of(path, item.nodeid)
            words = f"{100 * share:g} % more than the {format_bytes(known)} of {baseline}"
            bounds.append((int(known * (1 + share)), words))
    return bounds


def _increase_of(share: object = None, baseline: object = None) -> tuple[float, str]:
    text = str(share).strip()
    try:
        amount = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < float("inf") or not isinstance(baseline, str):
        raise UsageError(f"{_INCREASE} takes a share and a file, as in ('2%', baseline='memory.json').")
    return amount, baseline


def _baseline_of(path: Path, test: str) -> int:
    """Returns a test's peak in a baseline: its own, or that of a summary."""
    try:
        text = read_text(path)
        record = parse_json(text)
    except OSError:
        raise UsageError(f"baseline {path} not found: write it with pytest --memprof-update.") from None
    except ValueError:
        raise UsageError(f"{path} is not valid JSON: rewrite it with pytest --memprof-update.") from None
    if isinstance(record, dict) and "memprof_summary" in record:
        from memprof.analysis.diff.summary import read_summary

        return read_summary(text, str(path)).peak.bytes
    value = record.get(test) if isinstance(record, dict) else None
    if type(value) is not int:
        raise UsageError(f"{path} has no peak for {test}: write it with pytest --memprof-update.")
    return value


class _Peaks:
    """Collects peaks from test reports, in the process that writes the terminal output (with xdist, the controller)."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._peaks: dict[str, tuple[int, str]] = {}
        self._baselines: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Reads the peak from a report."""
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == _PROPERTY and isinstance(value, list | tuple):
                self._peaks[report.nodeid] = (int(value[0]), str(value[1]))
            elif name == _BASELINE:
                self._baselines[report.nodeid] = str(value)

    def pytest_sessionfinish(self) -> None:
        """Writes the baselines if requested; does nothing in an xdist worker."""
        if not self._config.getoption("--memprof-update") or hasattr(self._config, "workerinput"):
            return
        for path in sorted({Path(path) for path in self._baselines.values()}):
            known = _read_baseline(path)
            known |= {
                test: self._peaks[test][0]
                for test, own in self._baselines.items()
                if Path(own) == path and test in self._peaks
            }
            with whole_file(path) as file:
                file.write(f"{json.dumps(dict(sorted(known.items())), indent=1)}\n".encode())

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Lists the peaks, highest first."""
        if not self._config.getoption("--memprof") or not self._peaks:
            return
        terminalreporter.section("peak memory (memprof)")
        for test, (peak, place) in sorted(self._peaks.items(), key=lambda one: -one[1][0]):
            terminalreporter.write_line(f"{format_bytes(peak):>12}  {test}{f'  {place}' if place else ''}")


def _read_baseline(path: Path) -> dict[str, int]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(record, dict) and "memprof_summary" not in record
    return {test: peak for test, peak in record.items() if type(peak) is int} if is_ours else {}
