"""Emitted PyTorch code trains as memprof does under the plan: the same numbers, the same peak."""

from __future__ import annotations

import itertools

import pytest
import torch

from memprof.emit.emission import Emitted, Request
from memprof.emit.registry import target_named
from memprof.policies.plan.plan_file import parse_plan
from tests.emit.running import run
from tests.policies.faces import compare, load_job

#: Job, plan, and what the peak of the emitted code may differ by, with the reason.
PLANS = {
    "regions": ("gpt", "[checkpoint]\nmodules = ['layers.[0-1]', 'layers.*.mlp']", 0),
    "keep": ("gpt", "[checkpoint]\nmodules = ['layers.*', '**.mlp']\nkeep = ['matmul', 'attention']", 0),
    "segments": ("resnet", "[checkpoint]\nsegments = 3", 0),
    "statistics": ("resnet", "[checkpoint]\nmodules = ['stages.*', '**.relu']", 0),
    "bf16": ("gpt", "[precision]\ndtype = 'bf16'", 0),
    # memprof keeps the scale and its inverse in the model, GradScaler the scale alone: one number less.
    "fp16": ("gpt", "[precision]\ndtype = 'fp16'", -4),
    "pure": ("gpt", "[precision]\nweights = 'bf16'", 0),
    "accumulate": ("gpt", "[accumulate]\nmicro_batches = 3", 0),
    # The code scales the loss of each part, memprof its gradients: which is the peak depends on the processor.
    "scaled parts": ("resnet", "[accumulate]\nmicro_batches = 2\n[precision]\ndtype = 'fp16'", None),
    "swap": ("gpt", "[swap]\nmodules = ['layers.*']\nto = 'disk'\nprefetch = 0", 0),
    "states": ("gpt", "[swap]\nwhat = 'optimizer'\nto = 'disk'\nminimum_bytes = 1", 0),
    # The code keeps one number in place of what is out, memprof nothing.
    "states one by one": ("gpt", "[swap]\nwhat = 'optimizer'\nto = 'disk'\nminimum_bytes = 1\none_by_one = true", 4),
    "some states": ("gpt", "[swap]\nwhat = 'optimizer'\nto = 'disk'\nmodules = ['layers.1', 'token']", 4),
    "in backward": ("gpt", "[optimizer]\nin_backward = true\nloop = 'foreach'", 0),
    "fused": ("gpt", "[optimizer]\nloop = 'fused'", 0),
    "compiled": ("gpt", "[compile]\nmodules = ['layers.*.mlp']\nactivation_budget = 0.5", 0),
    "runtime": ("gpt", "[loss]\nhead = 'head'\n[compress]\nmodules = ['layers.3']", 0),
    "all": (
        "gpt",
        (
            "[precision]\ndtype = 'bf16'\n[accumulate]\nmicro_batches = 2\n[checkpoint]\nmodules = ['layers.[0-1]']\n"
            "[swap]\nmodules = ['layers.[0-2]']\nto = 'disk'\nprefetch = 0\n[compress]\nmodules = ['layers.3']\n"
            "[optimizer]\nloop = 'loop'"
        ),
        0,
    ),
}

#: Held in the main by the others, "all" foremost.
SLOWER = {
    "states",
    "regions",
    "segments",
    "bf16",
    "accumulate",
    "scaled parts",
    "swap",
    "fused",
    "runtime",
    "pure",
    "compiled",
}
SLOW = pytest.mark.slow


def emit(text: str, **request: object) -> Emitted:
    return target_named("pytorch").emit(Request(parse_plan(text), "plan.toml", **request))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name in SLOWER else ()) for name in PLANS])
def test_emitted_code_trains_as_memprof_does(name: str) -> None:
    """Every loss and the weights at the end are equal to the bit, and so is the peak of a recorded step to the byte."""
    job, plan, difference = PLANS[name]
    emitted = emit(plan)
    applied = run(job, plan=parse_plan(plan))
    found = run(job, text=emitted.text)
    assert not emitted.cannot
    assert found.losses == applied.losses
    assert found.state == applied.state
    if difference is None:
        assert 0.95 * applied.peak_bytes <= found.peak_bytes < applied.peak_bytes, compare(applied.step, found.step)
    else:
        assert found.peak_bytes - applied.peak_bytes == difference, compare(applied.step, found.step)


def test_a_copy_ahead_is_said_to_be_missing() -> None:
    """With prefetch the emitted code waits instead: it is that of prefetch = 0, and a note says so."""
    emitted = emit("[swap]\nmodules = ['layers.*']\nto = 'disk'\nprefetch = 2")
    assert "every copy is synchronous, instead of 2 copies ahead" in emitted.notes[0]
    assert emitted.notes[0][:40] in emitted.text


@pytest.mark.parametrize(
    ("plan", "part"),
    [
        ("[checkpoint]\nmodules = ['layer.*']", "No module of this GPT matches"),
        ("[checkpoint]\nmodules = ['layers.*.mlp']\n[compile]\nmodules = ['nowhere']", "matches 'nowhere'"),
        ("[swap]\nto = 'host'", "moves tensors from a cuda device, not cpu"),
    ],
)
def test_a_model_that_the_plan_is_not_for_is_refused(plan: str, part: str) -> None:
    """A pattern that matches nothing ends in an error that names it, as with memprof.apply."""
    with pytest.raises(ValueError, match=part):
        run("gpt", text=emit(plan).text)


@pytest.mark.gpu
def test_activations_leave_the_gpu() -> None:
    """Swapped to pinned memory of the host, the same losses come of fewer bytes on the device."""
    found = []
    for code in ("", emit("[swap]\nmodules = ['layers.*']").text):
        job, scope = load_job("gpt"), {}
        torch.manual_seed(0)
        loader, model = job.make_loader(), job.make_model().cuda()
        optimizer = job.make_optimizer(model)
        if code:
            exec(compile(code, "under_plan.py", "exec"), scope)
            scope["prepare"](model, optimizer)
        torch.cuda.reset_peak_memory_stats()
        losses = []
        for batch in itertools.islice(loader, 3):
            optimizer.zero_grad()
            loss = job.loss_of(model, [each.cuda() for each in batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append((losses, torch.cuda.max_memory_allocated()))
    (plain, whole), (swapped, peak) = found
    assert swapped == pytest.approx(plain, rel=1e-5)
    assert peak < whole


def test_steps_inside_backward_are_left_out_where_gradients_are_not_whole_then() -> None:
    """memprof stops such a job; code that trains wrongly is not written, and the sentence says why."""
    for other, word in (("[accumulate]\nmicro_batches = 2", "accumulated"), ("[precision]\ndtype = 'fp16'", "scaled")):
        emitted = emit(f"{other}\n[optimizer]\nin_backward = true\nloop = 'foreach'")
        assert word in emitted.cannot[0]
        assert "_step_in_backward" not in emitted.text
        assert "_set_loop(optimizer, foreach=True, fused=False)" in emitted.text


def test_ranks_are_another_target() -> None:
    """One process is written; the rest of the plan is in it, and the sentence names the target that divides."""
    emitted = emit("[shard]\nworld_size = 2\n[checkpoint]\nmodules = ['layers.*']")
    assert emitted.expressed == 1
    assert "--to fsdp2" in emitted.cannot[0]
    assert emitted.cannot[0].split(":")[0] in emitted.text


def test_text_in_a_plan_cannot_leave_the_docstring() -> None:
    """Names and paths of a plan stand in the text as data: quotes and backslashes in them end nothing."""
    name = 'x""" + boom() + """\\'
    emitted = target_named("pytorch").emit(
        Request(parse_plan(f"[swap]\nto = 'disk'\nfolder = '{name}'\nmodules = ['a\"b', 'c\\d']"), name)
    )
    code = compile(emitted.text, "under_plan.py", "exec")
    assert "boom" not in code.co_names
    assert any("_modules" in str(each) for each in code.co_consts)
