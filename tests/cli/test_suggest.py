"""`memprof suggest` as it is typed and read."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.analysis.plans import suggest_words
from memprof.analysis.plans.basis import basis_of
from memprof.analysis.plans.dry_check_results import Checked
from memprof.analysis.plans.suggest import Suggestion, suggest
from memprof.cli.main import main
from memprof.launch.dry.dry_compiled import CompiledPlans
from memprof.planners.search.request import SearchRequest
from memprof.policies.plan.plan_file import read_plan
from memprof.replay.live import live_bytes
from memprof.trace.manifest import Manifest, Speed
from memprof.trace.schema import TABLES, Modules, Steps
from memprof.trace.store import Trace, write_trace

SAMPLES = Path(__file__).parent.parent.parent / "sample_traces"
PEAK = 93_237_072


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(SAMPLES / "gpt" / "run.memprof", "run.memprof")
    shutil.copy(SAMPLES / "resnet" / "run.memprof", "resnet.memprof")
    return tmp_path


def rewrite(path: str, to: str, *, shorter: float = 1.0, **changes: Any) -> None:
    """Writes a recording again with another manifest, and steps that take less time."""
    trace = Trace.open(path)
    tables = {kind: trace.table(kind) for kind in TABLES}
    steps = trace.table(Steps)
    tables[Steps] = steps.replace(duration_us=steps.duration_us * shorter)
    write_trace(to, [(dataclasses.replace(trace.manifest, **changes), tables)])


def with_speed(manifest: Manifest, **machine: Any) -> dict[str, Any]:
    """Returns what says of a manifest's machine how fast it is: a tenth of what an RTX 3090 is."""
    speed = Speed(93_600.0, 3_200.0, 3_200.0, 3_560_000.0, 7_100_000.0, 1, "measured")
    return {"machine": dataclasses.replace(manifest.machine, speed=speed, **machine)}


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert main(list(map(str, words))) == status
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out if status in (0, 4) else captured.err


def test_page_lists_what_fits_and_what_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """A verdict, the plans that fit by step time, those that do not, why others cannot be, and what to type next."""
    page = run(capsys, "suggest", "run.memprof", "--budget", "80%")
    lines = page.splitlines()
    assert lines[0].startswith("Within 71.13 MiB: ")
    for title in ("Plans that fit", "Over budget", "Not possible here"):
        assert any(line.startswith(title) for line in lines)
    assert "1 " in page
    assert "checkpoint layers." in page
    again = "next: memprof suggest run.memprof --budget 80%"
    check, write, *_ = (line for line in lines if line.startswith("next: "))
    assert check.startswith(f"{again} --check")  # the plan found is not known to the byte
    assert write.startswith(f"{again} --write plan.toml")


def test_json_is_in_order_and_true(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that fit come first, the fastest of them first; --write keeps the first, which replaying repeats."""
    told = json.loads(run(capsys, "suggest", "run.memprof", "--budget", "80%", "--json", "--write", "plan.toml"))
    assert told["recorded"]["peak_allocated_bytes"] == PEAK
    assert told["budget_bytes"] == PEAK * 80 // 100
    fits = [plan for plan in told["plans"] if plan["fits"]]
    assert told["plans"][: len(fits)] == fits
    times_us = [plan["step_time_us"] for plan in fits[1:]]  # before them, one of fewer policies may come
    assert times_us == sorted(times_us)
    assert fits[0]["step_time_us"] <= told["recorded"]["step_time_us"]
    assert all(plan["peak_allocated_bytes"] <= told["budget_bytes"] for plan in fits)
    assert all(plan["peak_interval_bytes"][1] > told["budget_bytes"] for plan in told["plans"][len(fits) :])
    assert all(sum(plan["at_peak"].values()) == plan["peak_allocated_bytes"] for plan in told["plans"])
    assert told["minimum_feasible_bytes"] <= min(plan["peak_allocated_bytes"] for plan in told["plans"])
    plan = read_plan(Path("plan.toml"))
    assert plan.describe() == told["plans"][0]["describe"]
    step = Trace.open("run.memprof").steady_step()
    assert plan.prediction is not None
    assert plan.prediction.peak_allocated_bytes == live_bytes(plan.transform(step)).during.max() <= told["budget_bytes"]
    message = run(capsys, "suggest", "run.memprof", "--budget", "80%", "--write", "plan.toml", status=2)
    assert "plan.toml exists already" in message


def test_a_plan_for_ranks_is_tried_in_a_dry_run_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The recorded command starts one process; the options of the dry run start all ranks."""
    recorded_on = Trace.open("run.memprof").manifest.machine
    machine = dataclasses.replace(recorded_on, device_kind="cuda", device_name="RTX 4090")
    rewrite("run.memprof", "ranks.memprof", machine=machine, world_size=16, dry_ranks=16, dry_nodes=2)
    page = run(capsys, "suggest", "ranks.memprof", "--budget", "80%", "--allow", "checkpoint", "--write", "plan.toml")
    assert "next: memprof record --dry-run --device 'RTX 4090' --ranks 16 --nodes 2 --plan plan.toml" in page
    options = ("--budget", "80%", "--allow", "checkpoint", "--at-batch", "16", "-f", "--write", "plan.toml")
    page = " ".join(run(capsys, "suggest", "ranks.memprof", *options).split())
    assert "dry-run its ranks under it with the job's batch set to 16" in page


def test_times_are_those_of_the_machine_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the recording contains its machine's speed, times are scaled, labelled so, and kept in the plan."""
    rewrite("run.memprof", "known.memprof", **with_speed(Trace.open("run.memprof").manifest))
    search_flags = ("known.memprof", "--budget", "50%", "--allow", "checkpoint")
    here = json.loads(run(capsys, "suggest", *search_flags, "--json"))
    there = json.loads(
        run(capsys, "suggest", *search_flags, "--machine", "rtx3090", "--write", "plan.toml", "--json"),
    )
    assert (here["machine"], there["machine"]) == (None, "RTX 3090")
    assert there["recorded"]["step_time_us"] < here["recorded"]["step_time_us"]
    assert there["recorded"]["peak_allocated_bytes"] == here["recorded"]["peak_allocated_bytes"] == PEAK
    assert "modelled for RTX 3090" in there["times"]
    assert {plan["how"] for plan in there["plans"]} == {"modelled"}
    assert any("recorded on a CPU" in warning for warning in there["warnings"])
    plan = read_plan(Path("plan.toml"))
    assert plan.prediction is not None
    assert plan.prediction.machine == "RTX 3090"
    assert plan.prediction.step_time_us == there["plans"][0]["step_time_us"]
    page = run(capsys, "predict", "known.memprof", "--plan", "plan.toml", "--machine", "rtx3090")
    assert "Times are modelled for RTX 3090" in page
    # A run here cannot verify times there; it verifies the peak, which is over the budget.
    page = run(capsys, "verify", "plan.toml", "known.memprof", status=4)
    assert "step times are not compared: predicted for RTX 3090" in page
    manifest = Trace.open("run.memprof").manifest
    rewrite("run.memprof", "older.memprof", machine=dataclasses.replace(manifest.machine, speed=Speed()))
    unknown = run(capsys, "suggest", "older.memprof", "--budget", "50%", "--machine", "rtx3090")
    assert "Times are those of the recording machine" in unknown


def test_machine_of_the_recording_changes_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    """The device the job was recorded on is its own measure."""
    manifest = Trace.open("run.memprof").manifest
    changes = with_speed(manifest, device_name="NVIDIA GeForce RTX 3090", device_kind="cuda")
    rewrite("run.memprof", "own.memprof", **changes)
    search_flags = ("own.memprof", "--budget", "50%", "--allow", "checkpoint", "--json")
    told = [json.loads(run(capsys, "suggest", *search_flags, *more)) for more in ((), ("--machine", "rtx3090"))]
    assert told[0]["plans"] == told[1]["plans"]
    assert told[1]["machine"] is None


def test_compiled_run_is_a_plan_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    """It stands with what was measured; without one, the page says how to make it, unless it is forbidden."""
    told = json.loads(run(capsys, "suggest", "run.memprof", "--budget", "90%", "--json"))
    assert any("memprof record --compile '.'" in one["reason"] for one in told["refused"])
    told = json.loads(run(capsys, "suggest", "run.memprof", "--budget", "90%", "--forbid", "compile", "--json"))
    assert not any("compile" in one["plan"] for one in told["refused"])
    rewrite("run.memprof", "compiled.memprof", shorter=0.5, plan={"compile": {"activation_budget": 0.5}})
    search_flags = ("suggest", "run.memprof", "--budget", "95%", "--compiled", "compiled.memprof", "--json")
    (compiled,) = (plan for plan in json.loads(run(capsys, *search_flags))["plans"] if "compile" in plan["describe"])
    assert compiled["describe"] == "compile the whole model at 0.5"
    assert compiled["how"] == "measured"
    assert compiled["slowdown"] == pytest.approx(-0.5)
    assert not compiled["fits"]  # it has the peak of the recording it was made from
    assert compiled["peak_allocated_bytes"] == PEAK


def test_allow_and_forbid_choose_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    """Only what is allowed is used; an unknown name is answered with those there are."""
    told = json.loads(run(capsys, "suggest", "run.memprof", "--budget", "50%", "--allow", "checkpoint", "--json"))
    assert {policy["policy"] for plan in told["plans"] for policy in plan["policies"]} == {"checkpoint"}
    forbidden = ("--forbid", "swap,precision,remat", "--json")
    told = json.loads(run(capsys, "suggest", "run.memprof", "--budget", "50%", *forbidden))
    used = {policy["policy"] for plan in told["plans"] for policy in plan["policies"]}
    assert used
    assert not used & {"swap", "precision", "remat"}
    assert "give one of accumulate," in run(
        capsys, "suggest", "run.memprof", "--budget", "50%", "--allow", "magic", status=2
    )


@pytest.mark.parametrize(("limit", "searched_s"), [(("--time-limit", "20"), 8), ((), 60)])
def test_a_search_leaves_the_most_of_a_time_limit_to_compiled_plans(
    limit: tuple[str, ...], searched_s: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It often takes all it has, so that no compiled plan was dry-run; the last search has the limit again."""
    seen: list[tuple[float, bool]] = []

    def find_compiled(found: Suggestion, most: int, is_late: Callable[[], bool]) -> CompiledPlans:
        seen.append((found.answer.search_request.time_limit_s, is_late()))
        return CompiledPlans()

    monkeypatch.setattr("memprof.cli.verbs.plans.plan_search.find_compiled", find_compiled)
    run(capsys, "suggest", "run.memprof", "--budget", "60%", "--compile", "--allow", "optimizer", *limit, status=4)
    assert [is_late for _, is_late in seen] == [False]
    assert searched_s / 2 < seen[0][0] <= searched_s  # less what it took to read the recording


def test_page_says_what_a_loop_counts_under_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    """A job with a fixed number of steps trains for fewer updates."""
    gpt = str(Path(__file__).parents[2] / "sample_traces" / "gpt-h200" / "run.memprof")
    page = run(capsys, "suggest", gpt, "--budget", "85%", "--allow", "accumulate")
    assert "the job's loop counts each of the 2 micro-batches as a batch" in page
    page = run(capsys, "suggest", gpt, "--budget", "1MiB", "--allow", "accumulate", status=4)
    assert "counts each" not in page


def test_page_names_the_simplest_plan_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest names three sets of modules for 1.6 points of step time: the simplest is a row, and that is said."""
    gpt = str(Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof")
    flags = ("suggest", gpt, "--budget", "60%", "--allow", "swap", "--no-run")
    told = json.loads(run(capsys, *flags, "--json"))
    fits = [plan for plan in told["plans"] if plan["fits"]]
    settings = [plan["describe"].count(",") + 1 for plan in fits]  # no operator is kept
    number = settings.index(1) + 1
    assert settings[0] > 1
    assert fits[number - 1]["step_time_us"] > fits[0]["step_time_us"]
    monkeypatch.setattr(suggest_words, "_MOST_SETTINGS", 1)  # a longer plan is in its row, not in the verdict
    page = " ".join(run(capsys, *flags).split())
    assert page.startswith(f"Within 53.35 MiB: plan 1 (swap: {settings[0]} settings), peak ")
    assert f"(plan {number}), 1 instead of {settings[0]} settings, step time +" in page
    assert f"--explain {number} --write simplest.toml" in page


def test_no_listed_plan_reserves_more_than_a_device_has() -> None:
    """As modelled, or as a dry run showed: that counts where one was made, and a plan that exceeded goes."""
    trace = Trace.open(SAMPLES / "gpt-h200" / "run.memprof")
    basis = basis_of(trace)
    budget = basis.peak_bytes * 8 // 10
    found = suggest(trace, basis, SearchRequest(budget, allow=("checkpoint", "allocator"), counts_reserved=True))
    assert found.plans
    assert all(reserved is not None and reserved <= budget for reserved in found.reserved)
    best, number = found.plans[0], found.reserved[0] or 0
    less, more = (
        Checked(best.plan, best.peak_bytes, budget, best.peak_bytes, "", 0, size) for size in (number // 2, 2 * budget)
    )
    assert found.with_dry_runs((less,), best).reserved[0] == number // 2
    assert best not in found.with_dry_runs((more,)).plans


def test_budget_that_is_met_needs_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The job fits as it is: said so, no plan written, exit code 0."""
    page = run(capsys, "suggest", "run.memprof", "--budget", "1GiB", "--write", "plan.toml")
    assert page.startswith("The job already fits: its peak of 88.92 MiB is within 1.00 GiB.")
    assert not Path("plan.toml").exists()


def test_budget_that_nothing_meets_names_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 4, the least peak found, with which plan, where that peak is and what it holds."""
    page = run(capsys, "suggest", "run.memprof", "--budget", "5MiB", "--allow", "checkpoint", status=4)
    assert page.startswith("No plan found fits 5.00 MiB: the lowest peak is ")
    assert "with checkpoint layers.*" in page.splitlines()[0]
    assert "activation" in page.splitlines()[0]
    told = json.loads(
        run(capsys, "suggest", "run.memprof", "--budget", "5MiB", "--allow", "checkpoint", "--json", status=4)
    )
    again = run(capsys, "suggest", "run.memprof", "--budget", told["minimum_feasible_bytes"], "--allow", "checkpoint")
    assert again.startswith("Within ")


def test_slowdown_is_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that is slower than allowed does not count as fitting."""
    search_flags = ("suggest", "run.memprof", "--budget", "50%", "--allow", "checkpoint")
    told = json.loads(run(capsys, *search_flags, "--json"))
    assert told["plans"][0]["slowdown"] > 0.1
    page = run(capsys, *search_flags, "--max-slowdown", "1%", status=4)
    assert "Allow more with --max-slowdown" in page


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--budget", "many"), "many"),
        ((), "a budget is needed"),
        (("--budget", "50%", "--machine", "rtx3o90"), "rtx3"),
        (("--budget", "50%", "--max-slowdown", "soon"), "invalid slowdown 'soon'"),
        (("--budget", "50%", "--planner", "chian"), "did you mean 'chain'?"),
        (("--budget", "50%", "--also", "resnet.memprof"), "--also gives recordings of other sizes"),
        (("--budget", "50%", "--compiled", "resnet.memprof"), "is not a recording of a compiled run"),
        (("--budget", "50%", "--machine", "l4", "--compiled", "run.memprof"), "leave one out"),
        (("--budget", "50%", "--machine", "l4", "--compile"), "on the device that it was recorded on"),
    ],
)
def test_mistakes_get_one_sentence(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str) -> None:
    """What was read, what is wrong with it, what to write: exit code 2, nothing searched."""
    message = run(capsys, "suggest", "run.memprof", *words, status=2)
    assert sentence in message
    assert len(message.strip().splitlines()) == 1


def test_a_search_imports_no_published_planner() -> None:
    """They are for `--planner`, `--compare-planners` and the Python interface."""
    words = [
        "suggest",
        str(SAMPLES / "gpt" / "run.memprof"),
        "--budget",
        "90%",
        "--no-run",
        "--json",
        "--time-limit",
        "5",
    ]
    script = (
        f"import sys; from memprof.cli.main import main; code = main({words!r}); "
        "print(code, [name for name in sys.modules if 'planners.published' in name], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.stderr.splitlines()[-1] == "0 []", result.stderr


def test_what_all_names_begin_with_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrappers such as PEFT's put every module below base_model.model; JSON and plan files keep whole names."""
    trace = Trace.open("run.memprof")
    tables = {kind: trace.table(kind) for kind in TABLES}
    modules = tables[Modules]
    assert isinstance(modules, Modules)
    names = [f"base_model.model.{name}" if name else name for name in modules.name.tolist()]
    tables[Modules] = modules.replace(name=np.array(names, dtype=object))
    write_trace(Path("wrapped.memprof"), [(trace.manifest, tables)])
    flags = ("suggest", "wrapped.memprof", "--budget", "60%", "--allow", "swap", "--no-run")
    page = run(capsys, *flags)
    assert "modules are named below base_model.model" in " ".join(page.split())
    assert "swap activations of layers.0-2 to disk" in page
    assert "of base_model.model." not in page
    told = json.loads(run(capsys, *flags, "--json"))
    assert "base_model.model.layers.0-2" in told["plans"][1]["describe"]
