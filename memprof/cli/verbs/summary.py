"""`memprof summary`: a recording's key figures, in a few kilobytes that can be committed as a baseline."""

from __future__ import annotations

import json
from pathlib import Path

import click

from memprof.cli.options.shared_options import open_trace
from memprof.cli.pages.diff.diff_output import write_text
from memprof.harmless import notify


@click.command(
    epilog="""\b
Examples:
  memprof summary run.memprof -o memory.json
  memprof summary ranks/ | python -m json.tool
  memprof diff memory.json head.memprof --fail-on 'peak>+2%'"""
)
@click.argument("trace", type=click.Path(), metavar="TRACE")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write to this file, replacing it."
)
@click.option("--scrub", "is_scrubbed", is_flag=True, help="Leave out arguments, people and hosts, for sharing.")
@click.option("--json", "is_json", is_flag=True, help="Write JSON (the only format).")
def summary(trace: str, output: Path | None, is_scrubbed: bool, is_json: bool) -> None:
    """Write a recording's key figures as JSON: a baseline small enough to be committed.

    It contains the peak and the peak of each phase, the largest parts of each by category, module, operator, line and
    storage, and what the figures depend on. No path outside the job's own folder is included.
    """
    from memprof.analysis.diff.summary import summarise, summary_to_json

    opened = open_trace(trace, is_scrubbed=is_scrubbed)
    text = json.dumps(summary_to_json(summarise(opened)), indent=1, allow_nan=False) + "\n"
    write_text(text, output)
    if output is not None:
        notify(f"{len(text):,} bytes written to {output}")
