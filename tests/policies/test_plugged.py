"""A policy is added by one folder and one line of the registry; every verb and page then uses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from memprof.trace.store import Trace
from tests.warm import client

_TOP = Path(__file__).parents[2]
_GPT = str(_TOP / "sample_traces" / "gpt" / "train.py")
_SMALL = ("--layers", "2", "--width", "32", "--batch-size", "4", "--length", "32", "--steps", "8")

#: What does not need a process of its own: which lists hold the policy.
_LISTS = """
import json
import os

os.environ["_MEMPROF_COMPLETE"] = "bash_complete"
from pathlib import Path
import torch  # so that this is run in a fork (tests/warm)
from click.shell_completion import ShellComplete
from plotly.utils import PlotlyJSONEncoder
from memprof.cli.main import memprof
from memprof.launch.live.make_fit import live_policies
from memprof_dashboard.pages.whatif import WhatIf
from memprof_dashboard.sources import Workspace, open_sources
from memprof_dashboard.state import View
from tests.policies.matrix.cells import single_plans, title_of

offered = ShellComplete(memprof, {}, "memprof", "_X").get_completions(["suggest", "--allow"], "plug")
shown = json.dumps(WhatIf().layout(Workspace(open_sources([Path("plain.memprof")])), View()), cls=PlotlyJSONEncoder)
print(json.dumps({
    "completion": [each.value for each in offered],
    "page": '"value": "plugged"' in shown,
    "live": live_policies(("plugged",), ()),
    "matrix": [title_of(plan) for plan in single_plans() if "plugged" in title_of(plan)],
}))
"""

#: Runs verbs, given as JSON, and prints as JSON the status of each and what it printed, or why it failed.
_VERBS = """
import contextlib, io, json, sys
import torch
from memprof.cli.main import main

told = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(words)
    told.append([status, out.getvalue() if status == 0 else err.getvalue()])
print(json.dumps(told))
"""


@dataclass(frozen=True)
class House:
    """A copy of memprof with the policy in it."""

    folder: Path

    def python(self, *words: str, **variables: str) -> str:
        """Runs Python with the copy, and returns what it printed."""
        own = client.variables(str(self.folder), str(_TOP), with_memprof=False)
        done = subprocess.run(
            [sys.executable, "-P", *words],
            cwd=self.folder,
            env={**os.environ, **own, "OMP_NUM_THREADS": "1", **variables},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def memprof(self, *words: str, **variables: str) -> str:
        """Runs a verb."""
        return self.python("-m", "memprof.cli.main", *words, **variables)

    def verbs(self, *commands: Sequence[str], **variables: str) -> list[tuple[int, str]]:
        """Runs several in one process; returns the status of each, and what it printed or why it failed."""
        told = json.loads(self.python("-c", _VERBS, json.dumps(commands), **variables))
        return [(status, text) for status, text in told]

    @property
    def user(self) -> dict[str, str]:
        """Variables of a user whose recordings memprof knows, and may dry-run again."""
        return {name: str(self.folder / name) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """The copy, with a recording of a small job."""
    folder = tmp_path_factory.mktemp("house")
    shutil.copytree(_TOP / "memprof", folder / "memprof")  # with what is compiled of it
    shutil.copytree(_TOP / "dashboard" / "memprof_dashboard", folder / "memprof_dashboard")
    for name in ("plugged", "dry_only"):
        shutil.copytree(Path(__file__).parent / name, folder / "memprof" / "policies" / name)
    registry = folder / "memprof" / "policies" / "registry.py"
    text = registry.read_text()
    assert '    "swap",\n' in text
    registry.write_text(text.replace('    "swap",\n', '    "dry_only",\n    "plugged",\n    "swap",\n'))
    made = House(folder)
    made.memprof("record", "-o", "plain.memprof", _GPT, *_SMALL, **made.user)
    return made


@pytest.fixture(scope="module")
def predicted(house: House) -> int:
    """The peak that ``predict`` gives for it, below the recorded one."""
    found = json.loads(house.memprof("predict", "plain.memprof", "--plugged", "layers.*", "--json"))
    peak = int(found["predicted"]["peak_allocated_bytes"])
    assert peak < found["recorded"]["peak_allocated_bytes"]
    return peak


def test_every_list_of_policies_holds_it(house: House) -> None:
    """Completion, the What-if page, live application and the conformance matrix ask the registry."""
    assert json.loads(house.python("-c", _LISTS)) == {
        "completion": ["plugged"],
        "page": True,
        "live": ["plugged"],
        "matrix": ["plugged layers.*"],
    }


def test_suggest_tries_it_and_emit_writes_it(house: House, predicted: int) -> None:
    """A search tries it unasked; what no trainer has a setting for is applied by memprof."""
    words = ("suggest", "plain.memprof", "--budget", str(predicted + 1000), "--json")
    (_, everything), (_, allowed) = house.verbs(words, (*words, "--allow", "plugged", "--write", "plan.toml"))
    unasked, found = json.loads(everything), json.loads(allowed)
    tried = {policy["policy"] for plan in unasked["plans"] for policy in plan["policies"]}
    assert "plugged" in tried
    assert found["plans"][0]["fits"]
    assert [policy["policy"] for policy in found["plans"][0]["policies"]] == ["plugged"]
    for status, text in house.verbs(*(("emit", "plan.toml", "--to", to) for to in ("pytorch", "hf", "lightning"))):
        assert status == 0
        assert "[plugged]" in text
        assert "memprof.apply" in text


def test_fit_applies_it_as_predicted(house: House, predicted: int) -> None:
    """The plan that ``fit`` dry-runs and then measures is this policy, for few modules, and peaks as predicted."""
    words = ("fit", "--budget", str(predicted + 1000), "--allow", "plugged", "--json", "-o", "fitted", _GPT, *_SMALL)
    found = json.loads(house.memprof(*words))
    (attempt,) = found["attempts"]
    assert [policy["policy"] for policy in attempt["policies"]] == ["plugged"]
    peaks = [attempt[side]["peak_allocated_bytes"] for side in ("predicted", "dry_run", "measured")]
    assert peaks == [peaks[0]] * 3
    assert predicted <= peaks[0] <= predicted + 1000


def test_a_policy_without_a_prediction_is_dry_run(house: House) -> None:
    """Settings and a runtime are enough: what changes kernels is predicted by torch, in predict as in a search."""
    house.memprof("record", "-o", "real.memprof", "--dry_only", "bf16", _GPT, *_SMALL)
    measured = max(Trace.open(house.folder / "real.memprof").step_peaks().values())
    predict = ("predict", "plain.memprof", "--dry_only", "bf16")
    suggest = ("suggest", "plain.memprof", "--budget", str(measured), "--allow", "dry_only", "--json")
    told = house.verbs((*predict, "--json"), suggest, (*predict, "--no-run"), **house.user)
    assert [status for status, _ in told] == [0, 0, 2]
    found, best = json.loads(told[0][1]), json.loads(told[1][1])["plans"][0]
    assert (found["how"], found["predicted"]["peak_allocated_bytes"]) == ("dry-run", measured)
    assert (best["describe"], best["peak_allocated_bytes"]) == ("dry_only bf16", measured)
    assert "dry_only has no estimate: only a dry run of the recorded job predicts it." in told[2][1]
