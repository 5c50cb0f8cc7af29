"""What ``action.yml`` runs: records a job at a pull request and its base, compares them, comments, and gates.

The action passes its inputs as variables ``INPUT_...``; ``GITHUB_...`` are GitHub's own. Everything else is done by
memprof's commands and by ``gh``. The exit code is that of ``memprof diff``.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.errors import GateFailedError, InconclusiveError, MemprofError, UsageError
from memprof.launch.repository import Repository
from memprof.units import workflow_text

#: Variables that a job under test does not get.
_TOKENS = ("GH_TOKEN", "GITHUB_TOKEN")
#: GitHub draws a block of Mermaid as a picture; longer names and further phases would not be readable in it.
_MOST_BARS, _LONGEST_NAME = 8, 16
_MIB = 2**20
#: Exit codes of `memprof diff` with an answer.
_COMPARED = (0, GateFailedError.exit_code)


@dataclass(frozen=True)
class Inputs:
    """The inputs of the action.

    Attributes:
        run: The job, as typed behind ``memprof record``.
        device: The card that a dry run simulates; "" to record a real run.
        options: Further options of ``memprof record``.
        base: The commit to compare with; "" for the one that the event names.
        baseline: A recording or a summary to compare with, instead of a commit; "" for none.
        gates: The options ``--fail-on``, ``--warn-on`` and ``--ignore`` of ``memprof diff``, with their values.
        links: Files that are not committed and that the job needs at the base, too.
        name: Tells this comparison's comment from others on the same pull request.
        folder: Where recordings and pages are written.
        comments: Whether to write a comment.
    """

    run: tuple[str, ...]
    device: str
    options: tuple[str, ...]
    base: str
    baseline: str
    gates: tuple[str, ...]
    links: tuple[Path, ...]
    name: str
    folder: Path
    comments: bool

    @staticmethod
    def read(variables: Mapping[str, str]) -> Inputs:
        """Reads the inputs from the environment.

        Raises:
            UsageError: The job is missing, or has an unclosed quote.
        """

        def text(name: str) -> str:
            return variables.get(f"INPUT_{name}", "").strip()

        def words(name: str) -> tuple[str, ...]:
            try:
                return tuple(shlex.split(text(name)))
            except ValueError as error:
                raise UsageError(f"invalid input {name.lower()} {text(name)!r}: {error}.") from None

        def lines(name: str) -> list[str]:
            return [line.strip() for line in text(name).splitlines() if line.strip()]

        if not words("RUN"):
            raise UsageError("the input run is empty; it takes a job, such as: train.py --epochs 1")
        options = {"--fail-on": "FAIL_ON", "--warn-on": "WARN_ON", "--ignore": "IGNORE"}
        return Inputs(
            words("RUN"),
            text("DEVICE"),
            words("OPTIONS"),
            text("BASE"),
            text("BASELINE"),
            tuple(word for option, name in options.items() for value in lines(name) for word in (option, value)),
            tuple(Path(line) for line in lines("LINKS")),
            text("NAME") or "memory",
            Path(text("FOLDER") or "memprof-action").resolve(),
            text("COMMENT").lower() != "false",
        )


def compare_pull_request(inputs: Inputs) -> int:
    """Records, compares, writes the job summary and the comment, and returns the exit code of the gates.

    Raises:
        MemprofError: The job failed at the pull request or at its base, or the two cannot be compared.
    """
    folder, event = inputs.folder, _event()
    folder.mkdir(parents=True, exist_ok=True)
    head = folder / "head.memprof"
    _record(inputs, Path.cwd(), head, "this change")
    _memprof("report", str(head), "--html", str(folder / "memory.html"), "--force")
    base = _base(inputs, event)
    if base is None:
        text = f"`{inputs.run[0]}` is not in the base: nothing to compare with, and no gate was applied."
        _publish(inputs, event, f"### Memory\n\n{text}\n")
        return 0
    sides = ("diff", base, str(head), *inputs.gates)
    # Written even if the two are not comparable: the comment then says why.
    for form, name in (("markdown", "diff.md"), ("json", "diff.json")):
        _memprof(*sides, "--ignore", "all", "--format", form, "-o", str(folder / name), allowed=_COMPARED)
    text = (folder / "diff.md").read_text(encoding="utf-8").replace(f"{folder}{os.sep}", "")
    heading, _, rest = text.partition("\n")
    found = json.loads((folder / "diff.json").read_text(encoding="utf-8"))
    _publish(inputs, event, f"{heading}\n\n{draw([found['peak'], *found['phases']])}{rest}")
    # The job's summary is written already; this prints the annotations.
    return _memprof(*sides, "--format", "github", allowed=None, without=("GITHUB_STEP_SUMMARY",))


def draw(moments: Sequence[Mapping[str, Any]]) -> str:
    """Returns a picture in Mermaid: bars for this change, a line for the base.

    Args:
        moments: The peak and the phases as in the JSON of ``memprof diff``; bytes, or null where a side has none.
    """
    shown = moments[:_MOST_BARS]
    names = ["".join(c for c in one["name"] if c.isalnum() or c in " _-.")[:_LONGEST_NAME] for one in shown]
    base, head = (
        [0.0 if one[side] is None else round(one[side]["bytes"] / _MIB, 2) for one in shown]
        for side in ("base", "head")
    )
    top = max(*base, *head, 0.01) * 1.1
    return "\n".join([
        "```mermaid",
        "xychart-beta",
        '    title "MiB at the peak of each phase: bars, this change; line, the base"',
        f"    x-axis [{', '.join(json.dumps(name, ensure_ascii=False) for name in names)}]",
        f'    y-axis "MiB" 0 --> {top:.2f}',
        f"    bar {head}",
        f"    line {base}",
        "```",
        "",
    ])  # fmt: skip


def comment(repository: str, number: int, text: Path, marker: str) -> str:
    """Writes a comment on a pull request, or replaces the one that ends with the same marker.

    Args:
        repository: Owner and name, such as ``pytorch/pytorch``.
        number: The pull request's.
        text: File with the comment; its last line is the marker.
        marker: What tells this comment from others.

    Returns:
        Why it could not be written; "" if it was.
    """
    comments = f"repos/{repository}/issues/{number}/comments"
    try:
        listed = _gh("api", "--paginate", comments, "--jq", ".[] | {id, body}")
        own = [one["id"] for one in map(json.loads, listed.splitlines()) if one["body"].rstrip().endswith(marker)]
        where = ("PATCH", f"repos/{repository}/issues/comments/{own[0]}") if own else ("POST", comments)
        _gh("api", "--method", *where, "-F", f"body=@{text}", "--silent")
    except FileNotFoundError:
        return "gh is not installed"
    except subprocess.CalledProcessError as error:
        said = str(error.stderr).strip()
        if "HTTP 401" in said or "HTTP 403" in said:
            return "its token cannot write (a fork's pull request, or no permissions: pull-requests: write)"
        return said.splitlines()[-1] if said else f"gh ended with exit code {error.returncode}"
    return ""


def _event() -> dict[str, Any]:
    path = os.environ.get("GITHUB_EVENT_PATH")
    event: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    return event


def _base(inputs: Inputs, event: dict[str, Any]) -> str | None:
    """Returns the file of the base, recorded if necessary; None if the job's script does not exist there."""
    if inputs.baseline:
        return inputs.baseline
    if Path(inputs.run[0]).is_absolute():
        raise UsageError(f"{inputs.run[0]} is the same file at the base: name it relative to the working directory.")
    repository = Repository.around(Path.cwd())
    commit = repository.fetched(inputs.base or _base_of(event, repository))
    with repository.worktree(inputs.links) as tree:
        tree.check_out(commit)
        script = tree.folder / inputs.run[0]
        if script.suffix == ".py" and not script.exists():
            return None
        path = inputs.folder / "base.memprof"
        _record(inputs, tree.folder, path, f"the base, {commit.short}")
        return str(path)


def _base_of(event: dict[str, Any], repository: Repository) -> str:
    """Returns the commit that an event is to be compared with."""
    pull = event.get("pull_request")
    if pull:
        # The base's newest commit is the first parent of the merge that GitHub checks out; the event's may be older.
        parents = repository.parents(repository.commit("HEAD"))
        is_merge = len(parents) == 2 and parents[1] == pull["head"]["sha"]
        return str(parents[0] if is_merge else pull["base"]["sha"])
    found = str(event.get("merge_group", {}).get("base_sha") or event.get("before") or "")
    if not found.strip("0"):
        raise UsageError("the event names no commit to compare with: set the input base or baseline.")
    return found


def _record(inputs: Inputs, folder: Path, path: Path, side: str) -> None:
    dry = ("--dry-run", "--device", inputs.device) if inputs.device else ("--stop",)
    words = ("record", *dry, *inputs.options, "--force", "-o", str(path), *inputs.run)
    print(f"::group::memprof {shlex.join(words)} ({side})", flush=True)
    status = _memprof(*words, folder=folder, allowed=None, without=_TOKENS)
    print("::endgroup::", flush=True)
    if status:
        raise InconclusiveError(f"the job ended with exit code {status} at {side}; its output is above.")


def _memprof(
    *words: str, folder: Path | None = None, allowed: Sequence[int] | None = (0,), without: Sequence[str] = ()
) -> int:
    """Runs a command of memprof's and returns its exit code.

    Raises:
        MemprofError: The exit code is not among those allowed, and that of this error as well.
    """
    environment = {name: value for name, value in os.environ.items() if name not in without}
    command = [sys.executable, "-m", "memprof", *words]
    status = subprocess.run(command, check=False, cwd=folder, env=environment).returncode
    if allowed is not None and status not in allowed:
        error = MemprofError(f"memprof {words[0]} ended with exit code {status}; its message is above.")
        error.exit_code = status
        raise error
    return status


def _gh(*words: str) -> str:
    return subprocess.run(["gh", *words], check=True, capture_output=True, text=True).stdout


def _publish(inputs: Inputs, event: dict[str, Any], text: str) -> None:
    """Writes the text to the job's summary, and as a comment where there is a pull request."""
    where = {name: os.environ.get(f"GITHUB_{name}", "") for name in ("SERVER_URL", "REPOSITORY", "RUN_ID")}
    if all(where.values()):
        run = f"{where['SERVER_URL']}/{where['REPOSITORY']}/actions/runs/{where['RUN_ID']}"
        text = f"{text.rstrip()}\n\n[Recordings and report]({run}#artifacts)\n"
    marker = f"<!-- memprof-action: {inputs.name} -->"
    path = inputs.folder / "comment.md"
    path.write_text(f"{text.rstrip()}\n{marker}\n", encoding="utf-8")
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(path.read_text(encoding="utf-8"))
    if not inputs.comments or "pull_request" not in event:
        return
    reason = comment(where["REPOSITORY"], event["pull_request"]["number"], path, marker)
    if reason:
        print(f"::notice title=memprof::{workflow_text(f'No comment: {reason}. The job summary has it.')}", flush=True)


def main() -> int:
    """Runs the action in the current folder; returns its exit code."""
    try:
        return compare_pull_request(Inputs.read(os.environ))
    except MemprofError as error:
        print(f"::error title=memprof::{workflow_text(str(error))}", flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
