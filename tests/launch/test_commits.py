"""Commits: the search for the one that raised the memory, the repository it is in, and the file of measurements."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.analysis.commits import Commit, Job, Measurement, append_to_history, read_history
from memprof.analysis.diff.summary import Summary, summarise_step
from memprof.errors import BadInputError, InconclusiveError, UsageError
from memprof.launch.commit_runs import bisect_commits, search_branches
from memprof.launch.repository import Repository
from tests.building import Op, Storage, make_step

JOB = Job("train.py")


def _commits(count: int) -> list[Commit]:
    return [Commit(f"{number:040x}", "2026-11-26", "somebody", f"change {number}") for number in range(count)]


@pytest.fixture(scope="module")
def summary() -> Summary:
    ops = [Op("aten.mm.default", makes=["y"], reads=["x"])]
    return summarise_step(make_step(ops, [Storage("x", 100, "input"), Storage("y", 30)]))


def _summary(peak_bytes: int, made: Summary) -> Summary:
    return dataclasses.replace(made, spots={"peak": dataclasses.replace(made.peak, bytes=peak_bytes)})


def _git(folder: Path, *words: str, stdin: str | None = None) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *words], input=stdin, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three commits in a line, and a branch of one from the first."""
    _git(tmp_path, "init", "-q", "-b", "main")
    for name in ("name", "email"):
        _git(tmp_path, "config", f"user.{name}", "somebody@example.org")
    for text in ("one", "two", "three"):
        (tmp_path / "file").write_text(text)
        (tmp_path / f"only-{text}").write_text(text)
        _git(tmp_path, "add", ".")
        _git(tmp_path, "commit", "-q", "-m", text)
    _git(tmp_path, "branch", "aside", "HEAD~2")
    _git(tmp_path, "checkout", "-q", "aside")
    _git(tmp_path, "commit", "-q", "--allow-empty", "-m", "aside")
    _git(tmp_path, "checkout", "-q", "main")
    return tmp_path


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 199])
def test_each_commit_is_found_in_nine_runs(count: int, summary: Summary) -> None:
    """Of 200 commits, whichever raised the peak is named, its predecessor was measured, and 9 were run at most."""
    commits = _commits(count + 1)
    for first_bad in range(1, count + 1):
        measured: list[Commit] = []

        def measure(commit: Commit, first_bad: int = first_bad, measured: list[Commit] = measured) -> Measurement:
            measured.append(commit)
            peak = 100 + (50 if commits.index(commit) >= first_bad else 0)
            return Measurement(commit, JOB, _summary(peak, summary))

        found = bisect_commits(commits[0], commits[1:], measure, lambda base, head: head.peak.bytes > base.peak.bytes)
        assert found.culprit.commit == commits[first_bad]
        assert found.before.commit == commits[first_bad - 1]
        assert not found.between
        assert len(measured) == len(set(measured)) == len(found.measured) <= 9


@given(st.integers(2, 40), st.data())
def test_commits_that_cannot_be_run_are_skipped(count: int, data: st.DataObject) -> None:
    """The culprit is named if it and its predecessor can be run; else it is among the named candidates."""
    made = summarise_step(make_step([Op("aten.mm.default", makes=["y"])], [Storage("y", 30)]))
    commits = _commits(count + 1)
    first_bad = data.draw(st.integers(1, count))
    broken = data.draw(st.sets(st.integers(1, count - 1)))

    def measure(commit: Commit) -> Measurement:
        place = commits.index(commit)
        if place in broken:
            return Measurement(commit, JOB, None, "the job failed")
        return Measurement(commit, JOB, _summary(150 if place >= first_bad else 100, made))

    found = bisect_commits(commits[0], commits[1:], measure, lambda base, head: head.peak.bytes > base.peak.bytes)
    assert commits[first_bad] in (*found.between, found.culprit.commit)
    assert {commits.index(one) for one in found.between} <= broken
    if not {first_bad, first_bad - 1} & broken:
        assert found.culprit.commit == commits[first_bad]
        assert not found.between


def test_a_bad_commit_at_which_no_gate_fails_is_reported(summary: Summary) -> None:
    """Where no gate fails at the end, the message has both peaks; where an end cannot be run, the reason."""
    commits = _commits(4)
    same = _summary(100, summary)
    with pytest.raises(InconclusiveError, match=r"the peak is 100 B there, and 100 B at"):
        bisect_commits(commits[0], commits[1:], lambda one: Measurement(one, JOB, same), lambda *_: False)
    with pytest.raises(InconclusiveError, match="good commit 0000000000 cannot be measured: no such script"):
        bisect_commits(commits[0], commits[1:], lambda one: Measurement(one, JOB, None, "no such script"), lambda *_: 1)

    def measure(commit: Commit) -> Measurement:
        return Measurement(
            commit, JOB, same if commit == commits[0] else None, "" if commit == commits[0] else "broken"
        )

    with pytest.raises(InconclusiveError, match="bad commit 0000000000 cannot be measured: broken"):
        bisect_commits(commits[0], commits[1:], measure, lambda *_: False)


@pytest.mark.parametrize("is_in_branch", [True, False])
def test_the_branch_of_a_merge_is_searched(summary: Summary, *, is_in_branch: bool) -> None:
    """Commits 0 and 1 and the merge 5 are the main line, 2 one branch from 0, 3 and 4 another; none is listed twice."""
    commits = _commits(6)
    bad = commits[4:] if is_in_branch else commits[5:]

    def measure(commit: Commit) -> Measurement:
        return Measurement(commit, JOB, _summary(150 if commit in bad else 100, summary))

    def judge(base: Summary, head: Summary) -> bool:
        return head.peak.bytes > base.peak.bytes

    def branches_of(commit: Commit) -> list[list[Commit]]:
        return [[commits[0], commits[2]], [commits[0], *commits[3:5]]] if commit == commits[5] else []

    found = bisect_commits(commits[0], [commits[1], commits[5]], measure, judge)
    assert found.culprit.commit == commits[5]
    found = search_branches(found, branches_of, measure, judge)
    assert found.culprit.commit == bad[0]
    assert [merge.commit for merge in found.merges] == (commits[5:] if is_in_branch else [])
    listed = [one.commit.hash for one in found.measured]
    assert len(listed) == len(set(listed))


def test_a_repository_lists_its_commits(repository: Path) -> None:
    """Oldest first, with their fields; one that is not an ancestor, and unknown names, are refused in a sentence."""
    (repository / "folder").mkdir()
    opened = Repository.around(repository / "folder")
    assert (opened.root, opened.inside) == (repository, Path("folder"))
    assert [one.subject for one in opened.between("HEAD~2", "main")] == ["two", "three"]
    assert [one.subject for one in opened.newest(2)] == ["two", "three"]
    head = opened.commit("main")
    assert (head.subject, head.author, head.short) == ("three", "somebody@example.org", head.hash[:10])
    assert opened.changed_files(head) == ("file", "only-three")
    assert opened.between("main", "main") == []
    with pytest.raises(UsageError, match="aside is not an ancestor of main"):
        opened.between("aside", "main")
    for name in ("nothing", "--all", "-1"):
        with pytest.raises(UsageError, match="git log"):
            opened.commit(name)
    with pytest.raises(UsageError, match="is not in a Git repository"):
        Repository.around(Path("/"))


def test_a_merge_has_a_branch_for_each_further_parent(repository: Path) -> None:
    """Each begins where it left the main line; a commit of one parent, and the first of all, have none."""
    for name in ("left", "right"):
        _git(repository, "checkout", "-q", "-b", name, "main~1")
        (repository / name).write_text(name)
        _git(repository, "add", ".")
        _git(repository, "commit", "-q", "-m", name)
    _git(repository, "checkout", "-q", "main")
    _git(repository, "merge", "-q", "--no-ff", "-m", "all", "left", "right")
    opened = Repository.around(repository)
    branches = [[one.subject for one in branch] for branch in opened.branches_of(opened.commit("main"))]
    assert branches == [["two", "left"], ["two", "right"]]
    assert [*opened.branches_of(opened.commit("main~1")), *opened.branches_of(opened.commit("main~3"))] == []


def test_a_worktree_shows_each_commit_and_leaves_nothing(repository: Path) -> None:
    """What the last commit or a job left is gone, uncommitted data is linked, and the repository is as it was."""
    (repository / "data").mkdir()
    (repository / "data" / "rows").write_text("kept")
    (repository / "file").write_text("not committed")
    opened = Repository.around(repository)
    before = _git(repository, "status", "--porcelain")
    with opened.worktree([repository / "data"]) as worktree:
        for text, commit in zip(("two", "three"), opened.between("HEAD~2", "HEAD"), strict=True):
            worktree.check_out(commit)
            assert (worktree.folder / "file").read_text() == text
            assert not (worktree.folder / "left").exists()
            assert (worktree.folder / "data" / "rows").read_text() == "kept"
            (worktree.folder / "left").write_text("by a job")
        place = worktree.root
    assert not place.exists()
    assert _git(repository, "worktree", "list").count("\n") == 1
    assert _git(repository, "status", "--porcelain") == before
    assert (repository / "data" / "rows").read_text() == "kept"
    for path, words in ((Path("missing"), "does not exist"), (Path(os.sep), "is not in the repository")):
        with pytest.raises(UsageError, match=words), opened.worktree([path]):
            pass


def test_submodules_are_left_out_or_linked(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also where Git is set to check submodules out with every commit, which a temporary checkout cannot."""
    library = tmp_path_factory.mktemp("library")
    _git(library, "init", "-q")
    (library / "code.py").write_text("")
    for words in (["add", "."], ["commit", "-q", "-m", "library"]):
        _git(library, "-c", "user.name=somebody", "-c", "user.email=somebody@example.org", *words)
    _git(repository, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "library")
    _git(repository, "commit", "-q", "-m", "four")
    _git(repository, "config", "submodule.recurse", "true")
    opened = Repository.around(repository)
    for links, contents in (([], []), ([repository / "library"], ["code.py"])):
        with opened.worktree(links) as worktree:
            for commit in opened.between("HEAD~2", "HEAD"):
                worktree.check_out(commit)
            found = sorted(path.name for path in (worktree.folder / "library").iterdir() if path.name != ".git")
            assert found == contents
    assert _git(repository, "worktree", "list").count("\n") == 1
    assert (repository / "library" / "code.py").is_file()


def test_a_history_is_read_as_it_was_written(tmp_path: Path, summary: Summary) -> None:
    """The last line of a commit counts, and gives its place; damaged lines and later versions are refused."""
    path, (first, second) = tmp_path / "history.jsonl", _commits(2)
    assert read_history(path) == []
    append_to_history(path, Measurement(first, JOB, None, "the job failed"))
    append_to_history(path, Measurement(second, JOB, None, "no such script"))
    append_to_history(path, Measurement(first, JOB, summary))
    other, one = read_history(path)
    assert (one.commit, one.job, one.reason) == (first, JOB, "")
    assert one.summary is not None
    assert one.summary.peak.bytes == 130
    assert (other.commit, other.summary, other.reason) == (second, None, "no such script")
    for line, words in (("{", "history.jsonl:4 is not a line"), ('{"memprof_history": 9}', "is of version 9")):
        damaged = tmp_path / "damaged" / "history.jsonl"
        damaged.parent.mkdir(exist_ok=True)
        damaged.write_text(path.read_text() + line + "\n")
        with pytest.raises(BadInputError, match=words):
            read_history(damaged)
