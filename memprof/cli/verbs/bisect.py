"""`memprof bisect`: the commit that raised a job's memory."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import click

from memprof.cli.options.gate_options import commit_options, job_words, open_runs, say
from memprof.errors import UsageError

_DEFAULT_GATE = "peak>+1%"


@click.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog="""\b
Examples:
  memprof bisect v1.0 HEAD -- train.py --epochs 1
  memprof bisect --fail-on 'growth>0' HEAD~50 HEAD -- train.py
  memprof bisect --device rtx4090 --fail-on 'peak>23GiB' HEAD~50 HEAD -- -m package.train""",
)
@click.option(
    "--fail-on",
    multiple=True,
    metavar="GATE",
    help=f"What makes a commit bad, compared with GOOD; may be repeated.  [default: {_DEFAULT_GATE}]",
)
@commit_options
@click.option(
    "--history",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Take commits measured before from this file of memprof history, and add the others to it.",
)
@click.option("--json", "is_json", is_flag=True, help="Print everything as JSON: bytes, stable keys.")
@click.argument("good", metavar="GOOD")
@click.argument("bad", metavar="BAD")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- {SCRIPT | -m MODULE | COMMAND} [ARGS]...")
def bisect(
    good: str,
    bad: str,
    words: tuple[str, ...],
    fail_on: tuple[str, ...],
    device: str,
    links: tuple[Path, ...],
    history: Path | None,
    is_json: bool,
) -> int:
    """Find the first commit after GOOD, up to BAD, at which a job's memory exceeds a gate.

    Each commit is checked out into a temporary worktree, and the job is dry-run there: without a GPU, in seconds. The
    working tree is not touched. First parents are followed; if the first bad commit is a merge, so are its branches.

    The exit code is 3 if no commit can be named: the gates pass at BAD, or commits between the two could not be run.
    """
    job = job_words(words, "bisect GOOD BAD")
    from memprof.analysis.commits import Commit, Measurement, compare_commits
    from memprof.analysis.diff.gates import parse_gate
    from memprof.analysis.diff.summary import Summary
    from memprof.cli.page import show
    from memprof.cli.pages.bisect_page import bisection_to_json, fill_bisection, progress_line
    from memprof.errors import InconclusiveError
    from memprof.launch.commit_runs import bisect_commits, search_branches
    from memprof.launch.dry.dry_outcome import EndedError
    from memprof.launch.repository import Repository

    gates = [parse_gate(text) for text in fail_on or (_DEFAULT_GATE,)]
    repository = Repository.around(Path.cwd())
    first, later = repository.commit(good), repository.between(good, bad)
    if not later:
        raise UsageError(f"There is no commit after {good} up to {bad}: name an older commit first, then a newer one.")

    def judge(base: Summary, head: Summary) -> bool | None:
        found = compare_commits(base, head, fail=gates)
        if not all(verdict.is_known for _, verdict in found.verdicts):
            return None
        return found.is_failed

    with open_runs(repository, job, device, links, history) as runs:
        reference: list[Measurement] = []

        def measure(commit: Commit) -> Measurement:
            one = runs.measure(commit)
            reference[:] = reference or [one]
            say(progress_line(one, reference[0], judge, runs.count))
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
