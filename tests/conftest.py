"""Fixtures for every test."""

from __future__ import annotations

import gc
import os
import random
import signal

if "PYTEST_XDIST_WORKER" in os.environ:
    # One process a core already: more threads in each only wait for one another. Before torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Recordings of tests are not noted as this user's: `suggest` would dry-run their jobs unasked.
os.environ["XDG_STATE_HOME"] = "/dev/null/state"
# Whatever is installed: workspaces are estimates but for tests/virtual/test_cudnn.py, which `make test-cudnn` runs.
os.environ.setdefault("MEMPROF_CUDNN", "0")

from pathlib import Path

import pytest
from hypothesis import settings

from memprof.trace.manifest import Manifest
from memprof.trace.store import write_trace
from tests.building import Op, Storage, Tables, make_tables
from tests.slow_cases import is_slow_case
from tests.warm import client

# A busy machine is slow, not wrong. `make test` has fewer examples than `make test-all` (pytest_configure).
settings.register_profile("memprof", deadline=None)
settings.register_profile("memprof-short", deadline=None, max_examples=30)
settings.load_profile("memprof")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the slow cases, and keeps tests that share a fixture of their module or folder in one worker.

    It makes the fixture once. All tests in the browser are such a group, and the other worker has time for the rest.
    """
    if config.getoption("--shuffle") is not None:
        _shuffle(items, config.getoption("--shuffle"))
    if items and getattr(config.option, "loadgroup", False) and not hasattr(items[0], "_nodeid"):
        raise pytest.UsageError("this pytest ignores the groups of xdist: each worker would make every shared fixture")
    for item in items:
        if is_slow_case(item.nodeid):
            item.add_marker(pytest.mark.slow)
        fixtures = getattr(item, "_fixtureinfo", None)
        if fixtures is None or item.get_closest_marker("xdist_group") is not None:
            continue
        scopes = {found[-1].scope for found in fixtures.name2fixturedefs.values() if found}
        file = item.nodeid.partition("::")[0]
        if "package" in scopes:
            item.add_marker(pytest.mark.xdist_group(str(Path(file).parent)))
        elif "module" in scopes:
            item.add_marker(pytest.mark.xdist_group(file))


def _shuffle(items: list[pytest.Item], seed: int) -> None:
    """Sorts folders, the files of each and the tests of each file at random: what a file or a folder shares is kept.

    What else is run does not matter, so that a selection can be reduced to what fails.
    """

    def place(item: pytest.Item) -> list[float]:
        file = item.nodeid.partition("::")[0]
        return [random.Random(f"{seed} {name}").random() for name in (str(Path(file).parent), file, item.nodeid)]

    items.sort(key=place)


#: Variables by which libraries that earlier tests imported, or the developer's shell, would change what is printed.
_TERMINAL = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR")

#: Folders whose tests record in their own process.
_RECORDS = {"policies", "recorder", "virtual"}

#: The file whose tests run.
_of: dict[str, Path] = {}


def _forget_older_objects() -> None:
    """Freezes torch's objects, and those left by earlier files, for the garbage collector.

    A process that runs tests holds millions of objects. Each of its many recordings searches all of
    them for models, and would find those that earlier tests have left alive.
    """
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Lets the scripts that tests start run in forks of a process that has imported torch.

    A shell starts what runs in the background with Ctrl-C ignored, and `nohup` ignores SIGHUP; the jobs that tests send
    signals to would inherit that.
    """
    if config.getoption("markexpr") == "not slow":
        settings.load_profile("memprof-short")
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if config.getoption("--cold"):
        return
    if config.getoption("numprocesses", None):
        client.share()  # the workers use the servers of this process, which starts them
    else:
        client.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds an option with which every process of a test starts anew, and one for another order."""
    parser.addoption("--cold", action="store_true", help="Start every process anew, as tests marked `cold` always do")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="Run folders, files and tests in random order")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs a GPU where there is none, and says how the processes of this test start."""
    client.set_enabled(item.get_closest_marker("cold") is None)
    for name in _TERMINAL:
        os.environ.pop(name, None)
    if item.path != _of.get("path"):
        _of["path"] = item.path
        _forget_older_objects()
    elif item.path.relative_to(item.config.rootpath / "tests").parts[0] in _RECORDS:
        gc.collect()  # earlier tests leave models, in circles, which would be in one of two recordings
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture
def small_tables() -> Tables:
    """Two steps of y = x @ w, g = gradient of w: at most 100 + 40 + 30 + 40 bytes, and 5 inside the matmul."""
    forward = Op("aten.mm.default", module="fc", makes=["y"], reads=["x", "w"], saves=["x"], workspace=5)
    backward = Op(
        "aten.mm.default", phase="backward", module="fc", makes=["g"], reads=["y", "x"], frees=["y"], forward=0
    )
    update = Op("aten.add_.Tensor", phase="optimizer", reads=["g"], mutates=["w"], frees=["g"], stack="train.py:9:main")
    storages = [
        Storage("x", 100, "input"),
        Storage("w", 40, "parameter", name="fc.weight", module="fc"),
        Storage("y", 30, "activation", module="fc"),
        Storage("g", 40, "gradient", name="fc.weight", module="fc"),
    ]
    return make_tables([[forward, backward, update]] * 2, storages)


@pytest.fixture
def small_file(tmp_path: Path, small_tables: Tables) -> Path:
    """The small tables, written."""
    path = tmp_path / "run.memprof"
    write_trace(path, [(Manifest(target="train.py", pid=7), small_tables)])
    return path
