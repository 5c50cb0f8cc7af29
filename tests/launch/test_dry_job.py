"""Which job a dry run starts for a recording, and its messages where it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memprof.analysis.plans.dry_check_results import Checked, describe_difference, worth_keeping
from memprof.analysis.plans.suggest_words import describe_none
from memprof.errors import MemprofError
from memprof.launch.dry.dry_job import cover_recorded_steps, find_recorded_device, find_recorded_job
from memprof.launch.dry.dry_outcome import DryOutcome
from memprof.launch.fit.sentences import describe_dry_run
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import Target
from memprof.machines.catalogue import find_machine
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.request import SearchRequest
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.trace.manifest import Machine, Manifest, Window


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    return tmp_path


def test_recorded_command_is_started_again() -> None:
    """A script and a module run under this Python, wherever the recording's was; a command as it is."""
    script = find_recorded_job(Manifest(command=("/elsewhere/python3", "train.py", "--lr", "1")))
    assert script == Target((sys.executable, "train.py", "--lr", "1"), "train.py")
    module = find_recorded_job(Manifest(command=("/elsewhere/python3", "-m", "package.train", "-x")))
    assert module == Target((sys.executable, "-m", "package.train", "-x"), "package.train")
    command = (sys.executable, "-u", "train.py")
    assert find_recorded_job(Manifest(command=command)) == Target(command, "train.py")


@pytest.mark.parametrize(
    ("manifest", "sentence", "status"),
    [
        (Manifest(), "does not say how its job was started", 125),
        (Manifest(command=("python", "train.py"), plan={"checkpoint": {}}), "recorded under a plan already", 125),
        (Manifest(command=("python", "train.py"), dry_ranks=64), "record --dry-run --ranks 64 --plan", 125),
        (Manifest(command=("python", "gone.py")), "Run the command in the folder where the job was recorded", 127),
        (Manifest(command=("no-such-launcher", "train.py")), "no command no-such-launcher", 127),
    ],
    ids=["imported", "planned", "ranks", "script", "command"],
)
def test_job_that_cannot_be_started_is_said_to_be(manifest: Manifest, sentence: str, status: int) -> None:
    """One sentence each: what is missing, and what to do."""
    with pytest.raises(MemprofError) as error:
        find_recorded_job(manifest)
    assert sentence in str(error.value)
    assert error.value.exit_code == status


@pytest.mark.parametrize(
    ("window", "recorded", "expected"),
    [
        (DryWindow(), Window(skip=2, steps=3), DryWindow(skip=2, steps=3)),
        (DryWindow(isolate=False), Window(skip=4, steps=1), DryWindow(skip=4, steps=1, isolate=False)),
        (DryWindow(skip=1, steps=2, is_chosen=True), Window(skip=2, steps=3), DryWindow(1, 2, is_chosen=True)),
        (DryWindow(), Window(), DryWindow()),
        (DryWindow(), Window(skip=500, steps=3), DryWindow()),
    ],
    ids=["default", "later", "chosen", "imported", "too late"],
)
def test_a_check_covers_the_recorded_steps(window: DryWindow, recorded: Window, expected: DryWindow) -> None:
    """A plan is predicted for them; any others may be smaller. Chosen steps stay, and so do those near the start."""
    assert cover_recorded_steps(window, Manifest(window=recorded)) == expected


@pytest.mark.parametrize(
    ("steps", "last"), [((2, 3, 4), 4), ((2, 3, 4, 8), 8), ((2, 3, 4, 8, 900), 8)], ids=["none", "one", "too late"]
)
def test_a_check_covers_steps_that_were_recorded_later(steps: tuple[int, ...], last: int) -> None:
    """A larger evaluation at the end of an epoch, recorded as step 8, is the peak: without it dry runs are too low."""
    peaks = {number: 100 + number for number in steps}
    window = cover_recorded_steps(DryWindow(), Manifest(window=Window(skip=2, steps=3)), peaks)
    assert (window.skip, window.skip + window.steps - 1) == (2, last)


def test_a_check_of_steps_that_are_alike_covers_one() -> None:
    """The first of the job creates the optimizer state; a window that was chosen is kept."""
    manifest, peaks = Manifest(window=Window(skip=2, steps=3)), dict.fromkeys((2, 3, 4), 100)
    window = cover_recorded_steps(DryWindow(), manifest, peaks)
    assert (window.skip, window.steps) == (1, 1)
    later = cover_recorded_steps(DryWindow(), manifest, peaks | {8: 100})  # its evaluation may be the peak under a plan
    assert (later.skip, later.skip + later.steps - 1) == (2, 8)
    chosen = DryWindow(skip=2, steps=3, is_chosen=True)
    assert cover_recorded_steps(chosen, manifest, peaks) == chosen
    first = cover_recorded_steps(DryWindow(), Manifest(window=Window(skip=0, steps=2)), dict.fromkeys((0, 1), 100))
    assert (first.skip, first.steps) == (0, 2)


def test_job_of_a_gpu_is_shown_one_of_its_kind() -> None:
    """By the driver's name; one that memprof knows nothing of is refused, and a processor needs none."""
    assert find_recorded_device(Manifest()) == ""
    known = Manifest(machine=Machine(device_name="NVIDIA GeForce RTX 3090", device_kind="cuda"))
    assert find_recorded_device(known) == find_machine("rtx3090").name
    unknown = Manifest(machine=Machine(device_name="Abacus 9", device_kind="cuda"))
    with pytest.raises(MemprofError, match="recorded on Abacus 9"):
        find_recorded_device(unknown)


def test_plan_that_is_confirmed_is_kept_before_one_that_nobody_could_check() -> None:
    """Of plans predicted at 100 bytes: one 20 over a budget of 110, one unchecked, one 5 more than predicted."""
    over, unchecked, fits = (
        Checked(Plan((OptimizerPolicy(loop=way),)), 100, 110, dry, "" if dry else "cannot")
        for way, dry in (("loop", 130), ("foreach", None), ("fused", 105))
    )
    assert (over.fits, unchecked.fits, fits.fits) == (False, None, True)
    assert worth_keeping((over, unchecked, fits)) is fits
    assert worth_keeping((over, unchecked)) is unchecked
    assert worth_keeping((over,)) is None
    assert describe_none((over, over)).endswith("none is confirmed by a dry run: 2 over budget. None is kept.")
    assert describe_none((over, unchecked)).endswith("a dry run: 1 over budget, and 1 is unchecked. None is kept.")
    assert (fits.difference_bytes, fits.difference_ratio) == (5, 0.05)
    assert unchecked.difference_bytes is unchecked.difference_ratio is None
    assert describe_difference(105, 100) == "+5 B, +5 %"
    assert describe_difference(100, 100) == "as predicted"


def test_what_is_reserved_must_fit_a_device_too() -> None:
    """Tensors of 105 bytes are within 110, the 116 bytes of segments that hold them are not."""
    plan = Plan((OptimizerPolicy(loop="fused"),))
    checked = Checked(plan, 100, 110, 105, reserved_bytes=116)
    assert checked.fits is False
    assert checked.excess_bytes == 6
    assert worth_keeping((checked,)) is None
    assert Checked(plan, 100, 110, 105, reserved_bytes=110).fits is True
    assert describe_dry_run(checked) == "dry run: peak 105 B (+5 B, +5 %), 116 B reserved, above the budget, skipped"


@pytest.mark.parametrize(("counts_reserved", "fits"), [(True, False), (False, True)])
def test_only_the_budget_of_a_device_counts_what_is_reserved(counts_reserved: bool, fits: bool) -> None:
    """A dry run for `fit` or `suggest` with 105 bytes of tensors in 116 reserved, and a budget of 110."""
    plan = Plan((OptimizerPolicy(loop="fused"),))
    one = Candidate(plan.policies, 100, 1.0, "optimizer", "", "")
    request = SearchRequest(budget_bytes=110, counts_reserved=counts_reserved)
    assert DryOutcome(105, reserved_bytes=116).checked(plan, one, request).fits is fits
