"""The steps that a plan is made for, and the source of their times."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from memprof.analysis.plans.basis import Basis, basis_of, whole_steps
from memprof.analysis.plans.length_mix import read_lengths
from memprof.analysis.plans.predict import forecast
from memprof.errors import BadInputError
from memprof.machines.catalogue import find_machine
from memprof.policies.plan.plan import Plan
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace

GPT = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"


@pytest.fixture(scope="module")
def recorded() -> Basis:
    """The sample as it was recorded."""
    return basis_of(Trace.open(GPT))


def test_a_recording_is_replayed_with_its_own_times(recorded: Basis) -> None:
    """Without a machine the fullest step is as recorded, and others must fit as well."""
    trace = Trace.open(GPT)
    assert (recorded.machine, recorded.elsewhere, recorded.warnings, recorded.at) == ("", None, (), "")
    assert recorded.source == "replayed"
    assert recorded.step.number == trace.fullest_step(is_whole=True).number
    assert recorded.peaks == trace.step_peaks()
    assert recorded.peak_bytes == max(recorded.peaks.values()) == int(live_bytes(recorded.step).during.max())


def test_times_of_another_machine_are_modelled(recorded: Basis) -> None:
    """The bytes stay; times are the model's, with a warning where the recording is from a CPU."""
    machine = find_machine("rtx4090")
    found = basis_of(Trace.open(GPT), machine=machine)
    assert found.source == "modelled"
    assert found.machine == machine.name
    assert found.elsewhere is not None
    assert found.elsewhere.scaled_share > 0
    assert [warning.partition(":")[0] for warning in found.warnings] == ["this job was recorded on a CPU"]
    assert np.array_equal(live_bytes(found.step).during, live_bytes(recorded.step).during)
    assert found.step.duration_us < recorded.step.duration_us
    assert len(whole_steps(Trace.open(GPT), machine)) == len(whole_steps(Trace.open(GPT)))


def test_all_steps_have_the_short_types_of_the_device_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the card that was recorded on, or of the target; steps besides the fullest too."""
    trace = Trace.open(GPT)
    machine = dataclasses.replace(trace.manifest.machine, device_kind="cuda", device_name="Tesla T4")
    monkeypatch.setattr(trace, "manifest", dataclasses.replace(trace.manifest, machine=machine))
    for target, types in ((None, ("float16",)), (find_machine("rtx3090"), ("bfloat16", "float16"))):
        found = basis_of(trace, machine=target)
        steps = (found.step, *found.others, *whole_steps(trace, target))
        assert {step.short_types for step in steps} == {types}


def test_products_of_a_gpu_that_emulates_bfloat16_have_no_short_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate recorded there, which is slow, is not that of float16; that of another target is the catalogue's."""
    trace = Trace.open(GPT)
    speed = dataclasses.replace(trace.manifest.machine.speed, fp32_flops_per_us=4e6, bf16_flops_per_us=2e6)
    for name, expected in (("Tesla T4", (4e6, 0.0)), ("NVIDIA A100-SXM4-40GB", (4e6, 2e6))):
        machine = dataclasses.replace(trace.manifest.machine, device_kind="cuda", device_name=name, speed=speed)
        monkeypatch.setattr(trace, "manifest", dataclasses.replace(trace.manifest, machine=machine))
        assert basis_of(trace).step.product_flops_per_us == expected
        elsewhere = basis_of(trace, machine=find_machine("rtx3090")).step.product_flops_per_us
        assert elsewhere[1] > elsewhere[0] > 4e6


def test_a_recording_on_a_cpu_has_the_types_of_the_gpu_planned_for() -> None:
    """Its own are those of its kernels, which decide what workspaces were recorded."""
    trace, target = Trace.open(GPT), find_machine("t4")
    found = basis_of(trace, machine=target)
    for step in (found.step, *found.others, *whole_steps(trace, target)):
        assert (step.planned_types, "bfloat16" in step.short_types) == (("float16",), True)
    assert basis_of(trace).step.planned_types is None


def test_the_less_certain_source_counts(recorded: Basis) -> None:
    """A step at another size says how it was obtained, unless its times are known from less."""
    assert dataclasses.replace(recorded, scaled_by="rule").source == "rule"
    elsewhere = basis_of(Trace.open(GPT), machine=find_machine("rtx4090"))
    assert dataclasses.replace(elsewhere, scaled_by="replayed").source == "modelled"
    assert dataclasses.replace(recorded, batch=4, length=512).at == "batch 4 and length 512"


def test_a_prediction_names_the_machine_that_its_times_are_for(recorded: Basis) -> None:
    """A plan of no policy has the recorded peak, on that machine; without one, on none."""
    trace, machine = Trace.open(GPT), find_machine("rtx4090")
    found = forecast(trace, Plan(()), basis_of(trace, machine=machine)).plan.prediction
    assert found is not None
    assert (found.machine, found.how) == (machine.name, "replayed")
    assert found.peak_allocated_bytes == recorded.peak_bytes
    plain = forecast(trace, Plan(())).plan.prediction
    assert plain is not None
    assert plain.machine == ""


def test_lengths_are_read_a_line_each(tmp_path: Path) -> None:
    """Comments and empty lines are left out; of several numbers on a line the longest counts; errors name the line."""
    path = tmp_path / "lengths.txt"
    path.write_text("512\n# a comment\n\n100, 200 64  # two sides\n")
    assert read_lengths(path) == (512, 200)
    path.write_text("512\n-3\n")
    with pytest.raises(BadInputError, match="line 2: '-3' is not a length"):
        read_lengths(path)
    path.write_text("# nothing\n")
    with pytest.raises(BadInputError, match="contains no lengths"):
        read_lengths(path)
