"""Reads a Git repository, and checks its commits out in a temporary worktree."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memprof.analysis.commits import Commit
from memprof.errors import MemprofError, UsageError

_FIELDS = "%H%x00%as%x00%an%x00%s"
#: Settings under which Git runs: nothing of the user's may run or fail in a temporary checkout.
_SETTINGS = ("core.quotePath=false", "core.hooksPath=/dev/null", "submodule.recurse=false")
#: Limit on a Git command, in seconds; one that takes longer hangs, for example on a prompt.
_LIMIT_S = 300


class GitError(UsageError):
    """Git is missing, or refused a command (exit code 2)."""


@dataclass(frozen=True)
class Repository:
    """A Git repository.

    Attributes:
        root: Its top folder.
        inside: The current folder in it, relative to the top.
    """

    root: Path
    inside: Path

    @staticmethod
    def around(folder: Path) -> Repository:
        """Returns the repository that a folder is in.

        Raises:
            GitError: The folder is in none, or Git is not installed.
        """
        try:
            root = Path(_git(folder, "rev-parse", "--show-toplevel").rstrip("\n"))
        except GitError as error:
            raise GitError(f"{folder} is not in a Git repository: {error}") from None
        return Repository(root, folder.resolve().relative_to(root.resolve()))

    def commit(self, name: str) -> Commit:
        """Returns the commit that a branch, a tag, a hash or an expression such as ``HEAD~3`` names.

        Raises:
            GitError: It names none.
        """
        return self._log("-1", "--end-of-options", f"{name}^{{commit}}", "--")[0]

    def fetched(self, name: str) -> Commit:
        """Returns a commit as `commit` does; one that a shallow clone lacks is fetched from ``origin`` first.

        Raises:
            GitError: Neither the clone nor ``origin`` has it.
        """
        try:
            return self.commit(name)
        except GitError:
            _git(self.root, "fetch", "--quiet", "--no-tags", "--depth=1", "--end-of-options", "origin", name)
            return self.commit("FETCH_HEAD")

    def parents(self, commit: Commit) -> tuple[str, ...]:
        """Returns the hashes of a commit's parents, also of those that a shallow clone lacks."""
        head, _, _ = _git(self.root, "cat-file", "commit", commit.hash).partition("\n\n")
        return tuple(line.removeprefix("parent ") for line in head.splitlines() if line.startswith("parent "))

    def between(self, first: str, last: str) -> list[Commit]:
        """Returns the commits after one up to another, oldest first; of a merge, only the first parent is followed.

        Raises:
            GitError: A name is unknown, or the first is not an ancestor of the last.
        """
        base, head = self.commit(first), self.commit(last)
        found = self._log("--first-parent", "--reverse", f"{base.hash}..{head.hash}", "--")
        if _git(self.root, "merge-base", base.hash, head.hash).strip() == base.hash:
            return found
        raise GitError(f"{first} is not an ancestor of {last}: name an older commit first, then a newer one.")

    def branches_of(self, merge: Commit) -> Iterator[list[Commit]]:
        """Yields, for each branch that a merge brought in, the commit where it began and its commits, oldest first.

        Yields nothing for a commit that is not a merge, and leaves out branches that have no commit in common with its
        first parent.
        """
        first, *others = self.parents(merge) or ("",)
        for other in others:
            found = self._log("--first-parent", "--reverse", f"{first}..{other}", "--")
            try:
                base = _git(self.root, "merge-base", first, other).strip()
            except GitError:
                continue
            if found:
                yield [self.commit(base), *found]

    def newest(self, most: int, name: str = "HEAD") -> list[Commit]:
        """Returns the last commits up to one, oldest first.

        Raises:
            GitError: The name is unknown.
        """
        return self._log("--first-parent", f"-{most}", "--end-of-options", f"{name}^{{commit}}", "--")[::-1]

    def changed_files(self, commit: Commit) -> tuple[str, ...]:
        """Returns the files that a commit changed, compared with its first parent, in Git's order."""
        output = _git(self.root, "diff-tree", "-r", "--root", "-m", "--first-parent", "--name-only", "-z",
                      "--no-commit-id", commit.hash)  # fmt: skip
        return tuple(name for name in output.split("\0") if name)

    @contextmanager
    def worktree(self, links: Sequence[Path] = ()) -> Iterator[Worktree]:
        """Makes a worktree in a temporary folder, and removes it afterwards.

        Args:
            links: Files and folders that are not committed, such as data, that each checkout gets a link to.

        Raises:
            UsageError: A link is missing, or not in the repository.
        """
        inside = [_relative(path, self.root) for path in links]
        with tempfile.TemporaryDirectory(prefix="memprof-commits-") as scratch:
            folder = Path(scratch) / self.root.name
            _git(self.root, "worktree", "add", "--detach", "--no-checkout", str(folder), "HEAD")
            try:
                yield Worktree(folder, folder / self.inside, {folder / path: self.root / path for path in inside})
            finally:
                _git(self.root, "worktree", "remove", "--force", "--force", str(folder))

    def _log(self, *words: str) -> list[Commit]:
        output = _git(self.root, "log", "--no-show-signature", "-z", f"--format={_FIELDS}", *words)
        fields = output.split("\0")
        return [Commit(*fields[at : at + 4]) for at in range(0, len(fields) - 3, 4)]


@dataclass(frozen=True)
class Worktree:
    """A second checkout of a repository.

    Attributes:
        root: Its top folder.
        folder: The folder in it that corresponds to the current one.
        links: Links to create in it, and their targets.
    """

    root: Path
    folder: Path
    links: dict[Path, Path]

    def check_out(self, commit: Commit) -> None:
        """Replaces its files with those of a commit, and deletes whatever an earlier job left.

        Raises:
            GitError: Git cannot check it out.
        """
        for place in self.links:
            if place.is_symlink():  # otherwise a commit contains the path itself
                place.unlink()
        _git(self.root, "checkout", "--quiet", "--force", "--detach", commit.hash)
        _git(self.root, "clean", "-ffdxq")
        for place, target in self.links.items():
            if place.is_dir() and not any(place.iterdir()):  # a submodule, which is not checked out
                place.rmdir()
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(target.resolve())


def _relative(path: Path, root: Path) -> Path:
    if not path.exists():
        raise UsageError(f"--link {path} does not exist.")
    try:
        return Path(os.path.abspath(path)).relative_to(root)
    except ValueError:
        raise UsageError(f"--link {path} is not in the repository {root}.") from None


def _git(folder: Path, *words: str) -> str:
    """Returns what a Git command prints.

    Raises:
        GitError: Git is missing, or the command failed.
    """
    # Inside a hook or another Git command, GIT_DIR would otherwise choose the repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *(word for setting in _SETTINGS for word in ("-c", setting)), "-C", str(folder), *words],
            env={**environment, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise GitError("git is not installed, or not on PATH: commits are read with it.") from None
    except subprocess.TimeoutExpired:
        raise MemprofError(f"git {words[0]} did not end within {_LIMIT_S} s.") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise GitError(f"git {words[0]}: {said[-1].removeprefix('fatal: ')}")
    return done.stdout
