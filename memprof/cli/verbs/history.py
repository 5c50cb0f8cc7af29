"""`memprof history`: a job's memory over the commits of its repository."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from memprof.cli.options.command_classes import GroupedCommand, device_option, option, refuse_others
from memprof.cli.options.shared_options import HISTORY_FILE, job_words, json_option, open_runs, say
from memprof.errors import UsageError
from memprof.harmless import notify

if TYPE_CHECKING:
    from memprof.analysis.commits import Commit, Job, Measurement
    from memprof.analysis.diff.summary import Summary

_DEFAULT_COMMITS = 10
_DEFAULT_GATE = "peak>+1%"
_COMMITS, _CHART = "Commits", "Chart"


@click.command(
    cls=GroupedCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog="""\b
Examples:
  memprof history --commits HEAD~20..HEAD train.py --epochs 1
  memprof history --bisect v1.0..HEAD -- train.py --epochs 1
  memprof history --bisect HEAD~50..HEAD --fail-on 'growth>0' -- train.py
  memprof history --bisect HEAD~50..HEAD --device rtx4090 --fail-on 'peak>23GiB' -- -m package.train
  memprof history --add head.memprof
  memprof history --show activation --html memory.html
  memprof history --json""",
)
@option(
    "--commits",
    group=_COMMITS,
    metavar="A..B",
    help=f"Commits after A up to B, to be run.  [default: the last {_DEFAULT_COMMITS}]",
)
@option("--bisect", "bisected", group=_COMMITS, metavar="GOOD..BAD", help="Find the first commit that fails a gate.")
@option(
    "--fail-on",
    group=_COMMITS,
    multiple=True,
    metavar="GATE",
    help=f"What makes a commit bad, compared with GOOD; may be repeated.  [default: {_DEFAULT_GATE}]",
)
@device_option("device", "The GPU to simulate, such as rtx4090.  [default: the CPU]", group=_COMMITS, default="")
@option(
    "--link",
    "links",
    group=_COMMITS,
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A file or folder that is not committed, such as data, to link into each checkout; may be repeated.",
)
@option("--add", "added", group=_COMMITS, metavar="TRACE", help="Add a recording of the commit that is checked out.")
@option(
    "-o",
    "--file",
    "path",
    group="Output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=HISTORY_FILE,
    show_default=True,
    metavar="FILE",
    help="The history: a line of JSON for each commit. Commits that it has are not run again. --bisect uses one only "
    "if it is given.",
)
@option(
    "--show",
    group=_CHART,
    default="peak",
    show_default=True,
    metavar="MEASURE",
    help="Draw this: activation, module:layers.*, ...",
)
@option(
    "--html",
    "page_path",
    group=_CHART,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the chart to this file, which needs no network.",
)
@option("-f", "--force", group=_CHART, is_flag=True, help="Replace the HTML file if it exists.")
@json_option
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT | -m MODULE | -- COMMAND] [ARGS]...")
@click.pass_context
def history(
    ctx: click.Context,
    /,
    path: Path,
    commits: str | None,
    bisected: str | None,
    fail_on: tuple[str, ...],
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
    GPU, in seconds. The working tree is not touched. Without a job, the file is shown as it is. --add takes a recording
    that was made elsewhere, such as a real run in CI.

    With --bisect, only the commits that a binary search needs are run, to find the first one after GOOD, up to BAD, at
    which the job's memory exceeds a gate. First parents are followed; if the first bad commit is a merge, so are its
    branches. The exit code is 3 if no commit can be named: the gates pass at BAD, or commits between the two could not
    be run.
    """
    if bisected is not None:
        own = ("bisected", "fail_on", "device", "links", "path", "is_json")
        refuse_others(ctx, own, lambda _: "does not apply to --bisect: leave one of them out")
        known = path if ctx.get_parameter_source("path") is ParameterSource.COMMANDLINE else None
        job_found = job_words(words, "history --bisect GOOD..BAD")
        return _bisect(_ends("--bisect", bisected), job_found, fail_on, device, links, known, is_json=is_json)
    if fail_on:
        raise UsageError("--fail-on is what makes a commit bad: add --bisect GOOD..BAD.")
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
        chosen = repository.between(*_ends("--commits", commits))
    with open_runs(repository, job_words(words, "history"), device, links, path) as runs:
        for place, commit in enumerate(chosen, 1):
            is_known = runs.is_known(commit)
            one = runs.measure(commit)
            if not is_known:
                say(progress_line(one, place, len(chosen)))
        return runs.job


def _ends(option: str, text: str) -> tuple[str, str]:
    """Returns both ends of a range of commits.

    Raises:
        UsageError: It is none.
    """
    first, dots, last = text.partition("..")
    if not first or not dots or last.startswith("."):
        raise UsageError(f"invalid {option} {text!r}: write A..B, such as HEAD~20..HEAD.")
    return first, last or "HEAD"


def _bisect(
    ends: tuple[str, str],
    job: Sequence[str],
    fail_on: tuple[str, ...],
    device: str,
    links: tuple[Path, ...],
    known: Path | None,
    *,
    is_json: bool,
) -> int:
    """Prints the first commit that exceeds a gate, and returns the exit code; uses and extends a known history."""
    from memprof.analysis.commits import compare_commits
    from memprof.analysis.diff.gates import parse_gate
    from memprof.cli.page import show
    from memprof.cli.pages.history_page import bisection_line, bisection_to_json, fill_bisection
    from memprof.errors import InconclusiveError
    from memprof.launch.commit_runs import bisect_commits, search_branches
    from memprof.launch.dry.dry_outcome import EndedError
    from memprof.launch.repository import Repository

    good, bad = ends
    gates = [parse_gate(text) for text in fail_on or (_DEFAULT_GATE,)]
    repository = Repository.around(Path.cwd())
    first, later = repository.commit(good), repository.between(good, bad)
    if not later:
        raise UsageError(f"no commit after {good} up to {bad}: name an older commit first, then a newer one.")

    def judge(base: Summary, head: Summary) -> bool | None:
        found = compare_commits(base, head, fail=gates)
        if not all(verdict.is_known for _, verdict in found.verdicts):
            return None
        return found.is_failed

    with open_runs(repository, job, device, links, known) as runs:
        reference: list[Measurement] = []

        def measure(commit: Commit) -> Measurement:
            one = runs.measure(commit)
            reference[:] = reference or [one]
            say(bisection_line(one, reference[0], judge, runs.count))
            return one

        def branches_of(merge: Commit) -> Iterator[list[Commit]]:
            for branch in repository.branches_of(merge):
                reference.clear()  # a branch is compared with its own beginning
                yield branch

        try:
            found = bisect_commits(first, later, measure, judge)
            found = search_branches(found, branches_of, measure, judge)
        except EndedError as error:
            return 128 + signal.Signals(error.number)
    assert found.before.summary is not None
    assert found.culprit.summary is not None
    change = compare_commits(found.before.summary, found.culprit.summary)
    files = repository.changed_files(found.culprit.commit)
    show(
        lambda page: fill_bisection(page, found, change, files, gates, runs.count),
        lambda: bisection_to_json(found, change, files, runs.count),
        is_json=is_json,
    )
    return InconclusiveError.exit_code if found.between else 0
