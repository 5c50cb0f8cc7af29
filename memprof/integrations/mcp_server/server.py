"""Serves the tools over stdin and stdout."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from mcp.server import MCPServer

from memprof.integrations.mcp_server.access import Access
from memprof.integrations.mcp_server.tools import Tools
from memprof.version import __version__

_INSTRUCTIONS = """\
memprof records what fills the memory of a PyTorch training job, and finds a plan with which it fits.
Out of memory: dry_run the script on the device; if it does not fit, suggest a plan for the machine, dry_run again with
that plan, and confirm. Memory that grows: record the script, then leaks. After a change: record or dry_run both, diff.
Files are named by path, or by the ids of earlier answers (run1, plan1). An answer that was shortened is continued by
details with its id."""

#: Tools that run a job, and those that only read.
RUNNING = ("record", "dry_run")
READING = ("report", "suggest", "predict", "verify", "diff", "leaks", "explain", "details")


def serve(roots: Sequence[Path], *, runs_jobs: bool) -> None:
    """Serves until the client closes stdin.

    Args:
        roots: Folders that the client may read; jobs run in the first.
        runs_jobs: Whether to offer the tools that run jobs.

    Raises:
        UsageError: One of the roots is not a folder.
    """
    with tempfile.TemporaryDirectory(prefix="memprof-mcp-") as scratch:
        server = MCPServer("memprof", version=__version__, instructions=_INSTRUCTIONS, log_level="WARNING")
        tools = Tools(Access(roots, Path(scratch)))
        for name in (*(RUNNING if runs_jobs else ()), *READING):
            server.add_tool(getattr(tools, name), name=name, structured_output=False)
        server.run("stdio")
