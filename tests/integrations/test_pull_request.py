"""`action.yml`: its steps, run here with a `gh` that writes down what it is called with."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from memprof.integrations.pull_request import Inputs, comment, draw

ROOT = Path(__file__).parents[2]

JOB = """\
import os
import torch

assert "GH_TOKEN" not in os.environ
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(64, {width}), torch.nn.ReLU(), torch.nn.Linear({width}, 64)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(6):
    loss = model(torch.randn(256, 64, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

#: Stands for `gh api`: keeps the comments of one pull request in a file, and refuses to write where it is told so.
GH = """\
#!{python} -IS
import json, os, sys
from pathlib import Path

words, kept = sys.argv[1:], Path(__file__).with_name("comments.json")
assert words[0] == "api" and os.environ["GH_TOKEN"] == "a token"
comments = json.loads(kept.read_text())
with Path(__file__).with_name("calls").open("a") as file:
    file.write(" ".join(words) + "\\n")
if "--method" not in words:
    assert words[words.index("--jq") + 1] == ".[] | {{id, body}}"
    print("\\n".join(json.dumps(one) for one in comments))
elif Path(__file__).with_name("refuses").exists():
    sys.exit("gh: Resource not accessible by integration (HTTP 403)")
else:
    method, place = words[words.index("--method") + 1 :][:2]
    name, _, path = words[words.index("-F") + 1].partition("=@")
    assert name == "body"
    if method == "POST":
        assert place == "repos/o/r/issues/7/comments", place
        comments.append({{"id": 100 + len(comments), "body": Path(path).read_text()}})
    else:
        assert method == "PATCH"
        (one,) = [one for one in comments if place == f"repos/o/r/issues/comments/{{one['id']}}"]
        one["body"] = Path(path).read_text()
    kept.write_text(json.dumps(comments))
"""


class Hub:
    """A repository with a pull request, and what GitHub would keep of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clone, self.bin = folder, folder / "clone", folder / "bin"
        self.bin.mkdir()
        gh = self.bin / "gh"
        gh.write_text(GH.format(python=sys.executable))
        gh.chmod(gh.stat().st_mode | stat.S_IXUSR)
        (self.bin / "python").symlink_to(sys.executable)
        (self.bin / "comments.json").write_text(json.dumps([{"id": 1, "body": "<!-- memprof-action: memory -->, yes"}]))

    def git(self, *words: str, folder: Path | None = None) -> str:
        names = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        done = subprocess.run(
            ["git", *words],
            cwd=folder or self.folder / "origin",
            env=os.environ | names,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def open_pull_request(self) -> None:
        """The branch widens a layer; the merge with main is checked out alone, as GitHub does it."""
        origin = self.folder / "origin"
        self.git("init", "-q", "-b", "main", str(origin), folder=self.folder)
        for branch, width in (("main", 64), ("change", 256)):
            self.git("checkout", "-q", "-B", branch)
            (origin / "train.py").write_text(JOB.format(width=width))
            self.git("add", ".")
            self.git("commit", "-q", "-m", branch)
        self.git("checkout", "-q", "main")
        self.git("merge", "-q", "--no-ff", "-m", "merge", "change")
        self.git("config", "uploadpack.allowAnySHA1InWant", "true")
        self.git("clone", "-q", "--depth=1", f"file://{origin}", str(self.clone), folder=self.folder)
        heads = {"base": {"sha": "0" * 40}, "head": {"sha": self.git("rev-parse", "change")}}
        (self.folder / "event.json").write_text(json.dumps({"pull_request": {"number": 7, **heads}}))

    def run(self, **inputs: str) -> subprocess.CompletedProcess[str]:
        """Runs the action's step that compares."""
        action = _action()
        values = {name: str(one.get("default", "")) for name, one in action["inputs"].items()}
        values |= {name.replace("_", "-"): value for name, value in inputs.items()} | {"token": "a token"}
        (step,) = [step for step in action["runs"]["steps"] if "INPUT_RUN" in step.get("env", {})]
        own = {name: _filled(text, values, self.folder) for name, text in step["env"].items()}
        github = {
            "GITHUB_EVENT_PATH": str(self.folder / "event.json"),
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
            "GITHUB_REPOSITORY": "o/r",
            "GITHUB_SERVER_URL": "https://github.com",
            "GITHUB_RUN_ID": "9",
            "GITHUB_WORKSPACE": str(self.clone),
        }
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-eo", "pipefail", "-c", step["run"].replace("python ", f"{sys.executable} ")],
            cwd=self.clone / values["working-directory"],
            env=os.environ | own | github | {"PATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
        )

    @property
    def comments(self) -> list[str]:
        return [one["body"] for one in json.loads((self.bin / "comments.json").read_text())]


def _action() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    action: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
    return action


def _filled(text: str, inputs: Mapping[str, str], temporary: Path) -> str:
    """What GitHub makes of a text with expressions; one of another kind is an error."""
    known = {f"inputs.{name}": value for name, value in inputs.items()} | {"runner.temp": str(temporary)}
    return re.sub(r"\$\{\{ (\S+) \}\}", lambda found: known[found[1]], text)


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(tmp_path)


@pytest.fixture
def text(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A comment to write, with the fake gh on PATH."""
    monkeypatch.setenv("PATH", str(hub.bin))
    monkeypatch.setenv("GH_TOKEN", "a token")
    path = hub.folder / "comment.md"
    path.write_text("first\n<!-- m -->\n")
    return path


def test_a_pull_request_that_widens_a_layer_fails_its_gate(hub: Hub) -> None:
    """Both sides are recorded from a clone of depth 1, the comment has picture and table, and the status is diff's."""
    hub.open_pull_request()
    done = hub.run(run="train.py", fail_on="peak>+2%", options="--skip 1 --steps 2")
    assert done.returncode == 4, done.stdout + done.stderr
    (written,) = hub.comments[1:]
    assert written.startswith("### Memory: ")
    assert "    bar [" in written
    assert "| moment | base | head | change |" in written
    assert ":x:" in written
    assert "<sub>base.memprof against head.memprof, by memprof</sub>" in written
    assert "https://github.com/o/r/actions/runs/9#artifacts" in written
    assert written == (hub.folder / "summary.md").read_text()
    assert "::error file=train.py" in done.stdout
    files = {path.name for path in (hub.folder / "memprof-memory").iterdir()}
    assert {"head.memprof", "base.memprof", "memory.html", "comment.md", "diff.json"} <= files
    found = json.loads((hub.folder / "memprof-memory" / "diff.json").read_text())
    assert found["peak"]["change_bytes"] > 0
    assert hub.git("status", "--porcelain", folder=hub.clone) == ""
    assert len(hub.git("worktree", "list", folder=hub.clone).splitlines()) == 1


@pytest.mark.slow
def test_a_fork_gets_the_summary_and_a_sentence(hub: Hub) -> None:
    """A token that cannot write changes neither the exit status nor the job summary; a baseline replaces the base."""
    hub.open_pull_request()
    (hub.bin / "refuses").touch()
    first = hub.run(run="train.py", base="change", fail_on="peak>+2%", device="rtx4090")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "::notice title=memprof::No comment: its token cannot write" in first.stdout
    assert "| moment |" in (hub.folder / "summary.md").read_text()
    assert len(hub.comments) == 1
    baseline = str(hub.folder / "memprof-memory" / "head.memprof")
    (hub.clone / "train.py").write_text(JOB.format(width=512))
    second = hub.run(run="train.py", baseline=baseline, fail_on="peak>+2%", name="other", device="rtx4090")
    assert second.returncode == 4, second.stdout + second.stderr


@pytest.mark.slow
def test_a_job_that_is_new_or_fails(hub: Hub) -> None:
    """A script missing from the base is not an error; a job that fails is reported with its side."""
    hub.open_pull_request()
    (hub.clone / "new.py").write_text(JOB.format(width=64))
    new = hub.run(run="new.py", fail_on="peak>+2%")
    assert new.returncode == 0, new.stdout + new.stderr
    assert "nothing to compare with" in hub.comments[-1]
    absolute = hub.run(run=str(hub.clone / "new.py"))
    assert absolute.returncode == 2, absolute.stdout + absolute.stderr
    assert "name it relative to the working directory" in absolute.stdout
    (hub.clone / "train.py").write_text("raise SystemExit(9)\n")
    failed = hub.run(run="train.py")
    assert failed.returncode == 3, failed.stdout + failed.stderr
    assert "::error title=memprof::the job ended with exit code 9 at this change" in failed.stdout


def test_one_comment_is_written_and_then_replaced(hub: Hub, text: Path) -> None:
    """The second run updates the comment that the first created, and no comment that only quotes the marker."""
    assert comment("o/r", 7, text, "<!-- m -->") == ""
    text.write_text("second\n<!-- m -->\n")
    assert comment("o/r", 7, text, "<!-- m -->") == ""
    assert hub.comments[1:] == ["second\n<!-- m -->\n"]
    methods = [call.split()[2] for call in (hub.bin / "calls").read_text().splitlines() if "--method" in call]
    assert methods == ["POST", "PATCH"]


def test_why_there_is_no_comment(hub: Hub, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal and a missing gh are reasons, not failures."""
    (hub.bin / "refuses").touch()
    assert "cannot write" in comment("o/r", 7, text, "<!-- m -->")
    monkeypatch.setenv("PATH", str(hub.folder))
    assert comment("o/r", 7, text, "<!-- m -->") == "gh is not installed"


def test_the_picture_has_both_sides() -> None:
    """Bars and line are MiB; a phase of one side only has 0 on the other, and names cannot end the block."""
    picture = draw([
        {"name": "peak", "base": {"bytes": 2**20}, "head": {"bytes": 3 * 2**20}},
        {"name": 'a"]\n```', "base": None, "head": {"bytes": 2**19}},
    ])  # fmt: skip
    assert "    bar [3.0, 0.5]\n    line [1.0, 0.0]\n" in picture
    assert '    x-axis ["peak", "a"]\n' in picture
    assert picture.count("```") == 2


def test_inputs_are_read() -> None:
    """Words as a shell splits them, gates one a line."""
    inputs = Inputs.read({"INPUT_RUN": "train.py --name 'a b'", "INPUT_FAIL_ON": "peak>+2%\n\nleaks > 1\n"})
    assert inputs.run == ("train.py", "--name", "a b")
    assert inputs.gates == ("--fail-on", "peak>+2%", "--fail-on", "leaks > 1")


def test_the_action_passes_every_input_and_pins_what_it_uses() -> None:
    """No input is forgotten, none is pasted into a script, and other actions are named by commit."""
    action = _action()
    steps = action["runs"]["steps"]
    texts = json.dumps([{key: value for key, value in step.items() if key != "run"} for step in steps])
    assert {*re.findall(r"inputs\.([\w-]+)", texts)} == set(action["inputs"])
    assert not any("${{" in step.get("run", "") for step in steps)
    for workflow in [ROOT / "action.yml", *(ROOT / ".github" / "workflows").glob("*.yml")]:
        for used in re.findall(r"uses: (\S+)", workflow.read_text()):
            assert re.search(r"@[0-9a-f]{40}$", used) or used.startswith("./"), f"{workflow.name}: {used}"
