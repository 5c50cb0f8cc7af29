"""`memprof history`: a job's memory over the commits of its repository."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memprof.cli.options.gate_options import HISTORY_FILE, commit_options, job_words, open_runs, say
from memprof.errors import UsageError
from memprof.harmless import notify

if TYPE_CHECKING:
    from memprof.analysis.commits import Job

_DEFAULT_COMMITS = 10


@click.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog="""\b
Examples:
  memprof history --commits HEAD~20..HEAD train.py --epochs 1
  memprof history --add head.memprof
  memprof history --show activation --html memory.html
  memprof history --json""",
)
@click.option(
    "-o",
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=HISTORY_FILE,
    show_default=True,
    metavar="FILE",
    help="The history: a line of JSON for each commit. Commits that it has are not run again.",
)
@click.option(
    "--commits",
    metavar="A..B",
    help=f"Commits after A up to B, to be run.  [default: the last {_DEFAULT_COMMITS}]",
)
@commit_options
@click.option("--add", "added", metavar="TRACE", help="Add a recording of the commit that is checked out.")
@click.option(
    "--show", default="peak", show_default=True, metavar="MEASURE", help="Draw this: activation, module:layers.*, ..."
)
@click.option("--html", "page_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write the chart to this file, which needs no network.")  # fmt: skip
@click.option("-f", "--force", is_flag=True, help="Replace the HTML file if it exists.")
@click.option("--json", "is_json", is_flag=True, help="Print everything as JSON: bytes, stable keys.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT | -m MODULE | -- COMMAND] [ARGS]...")
def history(
    path: Path,
    commits: str | None,
    device: str,
    links: tuple[Path, ...],
    added: str | None,
    show: str,
    page_path: Path | None,
    force: bool,
    is_json: bool,
    words: tuple[str, ...],
) -> int:
    """Draw a job's memory over the commits of its repository, and explain the commits at which it changed.

    With a job, each of the commits is checked out into a temporary worktree, and the job is dry-run there: without a
    GPU, in seconds. Without one, the file is shown as it is. --add takes a recording that was made elsewhere, such as a
    real run in CI.
    """
    from memprof.analysis.commits import read_history, steps_in
    from memprof.analysis.diff.gates import parse_gate
    from memprof.cli.page import show as show_page
    from memprof.cli.pages.history_page import LEAST_SHARE, fill_history, history_to_json, in_order
    from memprof.launch.dry.dry_outcome import EndedError
    from memprof.launch.repository import GitError, Repository

    gate, job = parse_gate(f"{show}>0"), None
    if page_path is not None:
        from memprof.trace.files.place import check_output

        check_output(page_path, force=force)
    if added is not None:
        if words:
            raise UsageError("--add takes a recording, and a job is run: give one of them.")
        _add(path, added, Path.cwd())
    elif words:
        try:
            job = _run(path, commits, words, device, links)
        except EndedError as error:
            return 128 + signal.Signals(error.number)
    elif commits or device or links:
        raise UsageError("--commits, --device and --link are for a job that is run: name it, memprof history train.py")
    try:
        order = [commit.hash for commit in Repository.around(Path.cwd()).newest(100_000)]
    except GitError:  # a history may be read anywhere; its lines are then taken as they come
        order = []
    measured = in_order(read_history(path), job, order)
    if not measured:
        raise UsageError(f"{path} has no measurements yet: run a job at some commits, memprof history train.py")
    steps = steps_in(measured, gate, LEAST_SHARE)
    if page_path is not None:
        from memprof.cli.pages.history_page import history_to_html
        from memprof.trace.files.whole_file import whole_file

        with whole_file(page_path, is_private=False) as file:
            file.write(history_to_html(measured, steps, gate, show).encode())
        notify(f"wrote {page_path}")
    drawn = (measured, steps, gate, show)
    show_page(lambda page: fill_history(page, *drawn), lambda: history_to_json(*drawn), is_json=is_json)
    return 0


def _add(path: Path, added: str, folder: Path) -> None:
    """Appends a recording of the current commit."""
    from memprof.analysis.commits import Job, Measurement, append_to_history
    from memprof.analysis.diff.summary import summarise
    from memprof.launch.repository import Repository
    from memprof.trace.secrets import mask_words
    from memprof.trace.store import Trace

    opened = Trace.open(added)
    manifest = opened.manifest
    words = " ".join(mask_words(manifest.command[1:])) or manifest.target
    job = Job(words, manifest.machine.device_name, (manifest.window.skip, manifest.window.steps))
    append_to_history(path, Measurement(Repository.around(folder).commit("HEAD"), job, summarise(opened)))


def _run(path: Path, commits: str | None, words: tuple[str, ...], device: str, links: tuple[Path, ...]) -> Job:
    """Dry-runs the commits that the history lacks, and returns the job."""
    from memprof.cli.pages.history_page import progress_line
    from memprof.launch.repository import Repository

    repository = Repository.around(Path.cwd())
    if commits is None:
        chosen = repository.newest(_DEFAULT_COMMITS)
    else:
        first, dots, last = commits.partition("..")
        if not first or not dots or last.startswith("."):
            raise UsageError(f"invalid --commits {commits!r}: write A..B, such as HEAD~20..HEAD.")
        chosen = repository.between(first, last or "HEAD")
    with open_runs(repository, job_words(words, "history"), device, links, path) as runs:
        for place, commit in enumerate(chosen, 1):
            is_known = runs.is_known(commit)
            one = runs.measure(commit)
            if not is_known:
                say(progress_line(one, place, len(chosen)))
        return runs.job
