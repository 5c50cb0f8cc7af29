"""Starts the servers of a test process, and adds the module that passes processes to them to ``PYTHONPATH``."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.warm.relay import put_first

_HERE = Path(__file__).parent
_NAME, _PREFIX, _OTHER = "WARM_PYTHON", "WARM_PREFIX", "WARM_OTHER_MEMPROF"
#: The servers that are started; that of jobs forks another one.
_KINDS = ("job", "cli")
_ALL = (*_KINDS, "recorded")
_START = "import sys; exec(compile(open(sys.argv[1]).read(), '<frozen warm>', 'exec'))"


class Client:
    """The servers that this process starts with the first process that it starts, and the variable that names them.

    Where it was itself started by a test, they are those of that test's process.
    """

    def __init__(self) -> None:
        """Starts nothing."""
        self._pid = os.getpid()
        self._address = Path(tempfile.gettempdir()) / f"warm-python-{self._pid}"
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._is_enabled = False
        # Tests that a test runs go to the servers of that test's process.
        self._has_begun = _NAME in os.environ
        if self._has_begun:
            self._address = Path(os.environ[_NAME])

    def start_with(self, event: str, _: Any) -> None:
        """Starts the server where a first process is started; an audit hook."""
        if event == "subprocess.Popen" and self._is_enabled and not self._has_begun and os.getpid() == self._pid:
            self._start()

    def share(self) -> None:
        """Starts the servers for this process and for those that it starts in turn, such as the workers of pytest."""
        if not self._has_begun:
            self._start()
            os.environ[_NAME] = str(self._address)

    def _start(self) -> None:
        self._has_begun = True
        # Its end of the pipe closes with this process, however that ends.
        for kind in _KINDS:
            self._servers[kind] = subprocess.Popen(
                [sys.executable, "-c", _START, str(_HERE / "server.py"), f"{self._address}-{kind}", kind],
                stdin=subprocess.PIPE,
                env={**_without(os.environ), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        atexit.register(self._stop)

    def set_enabled(self, is_enabled: bool) -> None:
        """Says in the environment whether jobs are handed to the server."""
        self._is_enabled = is_enabled
        for name in (_NAME, _PREFIX):
            os.environ.pop(name, None)
        paths = _other_paths(os.environ)
        os.environ.pop("PYTHONPATH", None)
        if is_enabled:
            os.environ |= {_NAME: str(self._address), _PREFIX: sys.prefix}
            paths.insert(0, str(_HERE))
        if paths:
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)

    def _stop(self) -> None:
        if os.getpid() == self._pid:
            for server in self._servers.values():
                server.kill()
                server.wait()
            for kind in _ALL:
                Path(f"{self._address}-{kind}").unlink(missing_ok=True)


_client: Client | None = None


def install() -> None:
    """Makes a client for this process."""
    global _client  # noqa: PLW0603 - one a process
    if _client is None:
        _client = Client()
        sys.addaudithook(_client.start_with)
        sys.addaudithook(put_first)


def share() -> None:
    """Starts the servers here, for this process and for the processes that it starts."""
    install()
    assert _client is not None
    _client.share()


def set_enabled(is_enabled: bool) -> None:
    """Says whether the jobs that this process starts are handed to the server, where there is one."""
    if _client is not None:
        _client.set_enabled(is_enabled)


@contextmanager
def enabled() -> Iterator[None]:
    """Hands over what is started inside, in a test marked ``cold``: a process that is not what the test is about."""
    set_enabled(True)
    try:
        yield
    finally:
        set_enabled(False)


def variables(*paths: str, with_memprof: bool = True) -> dict[str, str]:
    """Returns what a test adds to a process's environment, where that is not the test's own.

    Args:
        paths: What the process has in ``PYTHONPATH``.
        with_memprof: Whether its memprof is the one that the servers have imported; else a command of memprof runs
            where only torch was imported.
    """
    is_enabled = _NAME in os.environ
    before = [str(_HERE)] if is_enabled else []
    found = {"PYTHONPATH": os.pathsep.join([*before, *paths])} if before or paths else {}
    return found if with_memprof or not is_enabled else {**found, _OTHER: "1"}


def _other_paths(environment: os._Environ[str]) -> list[str]:
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(_HERE))]


def _without(environment: os._Environ[str]) -> dict[str, str]:
    """Returns an environment in which processes hand nothing over."""
    paths = _other_paths(environment)
    plain = {name: value for name, value in environment.items() if name not in (_NAME, _PREFIX, "PYTHONPATH")}
    return {**plain, "PYTHONPATH": os.pathsep.join(paths)} if paths else plain
