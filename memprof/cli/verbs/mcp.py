"""`memprof mcp`: a server of the Model Context Protocol for agents."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from memprof.errors import UsageError


@click.command(
    epilog="""\b
Examples:
  memprof mcp
  memprof mcp --root . --root /data/recordings
  memprof mcp --no-run"""
)
@click.option(
    "--root",
    "roots",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="A folder whose files may be read; may be repeated. Jobs run in the first.  [default: the current folder]",
)
@click.option("--no-run", is_flag=True, help="Offer no tool that runs a job: recordings are only read.")
def mcp(roots: tuple[Path, ...], no_run: bool) -> None:
    """Serve memprof's verbs as tools to an agent, over stdin and stdout (Model Context Protocol).

    An agent's configuration starts this command; it ends when its stdin closes. Recordings and plans that the agent
    makes are kept until then, in a temporary folder.
    """
    if importlib.util.find_spec("mcp") is None:
        raise UsageError("memprof mcp needs the protocol's SDK: pip install 'torch-memprof[mcp]'")
    from memprof.integrations.mcp_server.server import serve

    serve(roots or (Path.cwd(),), runs_jobs=not no_run)
