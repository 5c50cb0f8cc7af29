"""Emitted code of FSDP2 divides a job as memprof does, and torchtitan's sets existing fields."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memprof.emit.emission import Emitted, Request
from memprof.emit.registry import target_named
from memprof.policies.plan.plan_file import parse_plan

ROOT = Path(__file__).resolve().parents[2]


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


PLAN = """
[shard]
world_size = 2
[precision]
dtype = "bf16"
[checkpoint]
modules = ["layers.[0-1]"]
[optimizer]
loop = "foreach"
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found, under memprof and as emitted."""
    folder = tmp_path_factory.mktemp("fsdp2")
    (folder / "plan.toml").write_text(PLAN)
    emitted = target_named("fsdp2").emit(Request(parse_plan(PLAN), "plan.toml"))
    assert not emitted.cannot
    (folder / "under_plan.py").write_text(emitted.text)
    files = [str(folder / name) for name in ("under_plan.py", "plan.toml", "found")]
    done = subprocess.run(
        [*TORCHRUN, "-m", "tests.emit.ranks", *files],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(2)]


@pytest.mark.slow  # torchrun, and two trainings in each rank
def test_ranks_train_as_under_memprof(ranks: list[dict[str, Any]]) -> None:
    """Each rank's losses are equal to the bit, and those of the two differ: they have batches of their own."""
    for found in ranks:
        assert found["emitted"]["losses"] == found["applied"]["losses"]
    assert ranks[0]["emitted"]["losses"] != ranks[1]["emitted"]["losses"]


@pytest.mark.slow  # torchrun, and two trainings in each rank
def test_each_rank_holds_its_half(ranks: list[dict[str, Any]]) -> None:
    """The parts of parameters are as large as memprof's, and the peak is the same to the byte.

    Except for 8 bytes: the mesh of memprof's run, two ranks' numbers, is still alive in the second run of the process.
    """
    for found in ranks:
        assert found["emitted"]["parameter_bytes"] == found["applied"]["parameter_bytes"]
        assert found["emitted"]["peak_bytes"] - found["applied"]["peak_bytes"] in (0, 8)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[shard]\nstage = 1\nworld_size = 2", "fully_shard shards parameters too (stages 2 and 3)"),
        ("[checkpoint]\nmodules = ['layers.*']", "the plan shards nothing that fully_shard supports"),
    ],
)
def test_what_divides_no_parameters_is_not_fsdp2(text: str, part: str) -> None:
    """Stage 1, and plans of one process: nothing is written, and the sentence names the target that would do."""
    emitted = target_named("fsdp2").emit(Request(parse_plan(text), "plan.toml"))
    assert not emitted.expressed
    assert part in " ".join(emitted.cannot)


def test_what_does_not_go_with_divided_parameters_is_left_out() -> None:
    """As memprof refuses it: steps in backward, state elsewhere, weights in bf16; the loop of updates is there."""
    text = (
        "[shard]\nstage = 2\nworld_size = 2\nunits = ['layers.*']\n[precision]\nweights = 'bf16'\n[swap]\n"
        "what = 'parameters'\n[optimizer]\nin_backward = true"
    )
    emitted = target_named("fsdp2").emit(Request(parse_plan(text), "plan.toml"))
    assert [sentence.split(":")[0] for sentence in emitted.cannot] == [
        "precision pure-bf16",
        "swap parameters to host",
        "optimizer in-backward",
    ]
    assert "reshard_after_forward=False" in emitted.text
    assert r'_modules(model, [r"layers\.[^.]*"])' in emitted.text


class _Section:
    """A section of a configuration with some fields, and no others: as dataclasses with slots are."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(name)
        self.__dict__[name] = value


def config() -> Any:
    """The fields of torchtitan 0.3.0 that we set, with its defaults: torchtitan/config/configs.py and trainer.py."""
    return _Section(
        training=_Section(
            local_batch_size=8,
            global_batch_size=-1,
            dtype="float32",
            mixed_precision_param="bfloat16",
            enable_cpu_offload=False,
        ),
        parallelism=_Section(
            data_parallel_replicate_degree=1, data_parallel_shard_degree=-1, fsdp_reshard_after_forward="default"
        ),
        optimizer=_Section(implementation="fused"),
        compile=_Section(enable=False),
        activation_checkpoint=None,
        loss=None,
    )


def emit(text: str) -> Emitted:
    return target_named("torchtitan").emit(Request(parse_plan(text), "plan.toml"))


def under_plan(emitted: Emitted, given: Any) -> Any:
    scope: dict[str, Any] = {}
    exec(compile(emitted.text, "under_plan.py", "exec"), scope)
    return scope["under_plan"](given)


def test_fields_are_set_as_the_plan_says() -> None:
    """Four ranks with a quarter of the batch each, in two parts of one sample; weights in bf16; all state offloaded."""
    emitted = emit(
        "[shard]\nstage = 2\nworld_size = 4\nbatch = 'split'\n[precision]\nweights = 'bf16'\n[accumulate]\n"
        "micro_batches = 2\n[optimizer]\nloop = 'loop'\n[[swap]]\nwhat = 'optimizer'\n[[swap]]\nwhat = 'parameters'"
    )
    made = under_plan(emitted, config())
    assert vars(made.training) == {
        "local_batch_size": 1,
        "global_batch_size": 8,
        "dtype": "bfloat16",
        "mixed_precision_param": "bfloat16",
        "enable_cpu_offload": True,
    }
    assert vars(made.parallelism) == {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 4,
        "fsdp_reshard_after_forward": "never",
    }
    assert made.optimizer.implementation == "for-loop"
    assert not emitted.cannot


def test_copies_of_the_model_have_batches_of_their_own() -> None:
    """Stage 0 over two ranks: an update is over the samples of both."""
    made = under_plan(emit("[shard]\nstage = 0\nworld_size = 2\n[accumulate]\nmicro_batches = 4"), config())
    assert made.parallelism.data_parallel_replicate_degree == 2
    assert (made.training.local_batch_size, made.training.global_batch_size) == (2, 16)


def test_what_has_no_field_is_said() -> None:
    """Some layers, kept operators, fp16, activations elsewhere, a stage between: nothing of them is written."""
    emitted = emit(
        "[shard]\nstage = 1\nworld_size = 2\n[precision]\ndtype = 'fp16'\n[[checkpoint]]\nmodules = ['layers.0']\n"
        "[[checkpoint]]\nmodules = ['layers.*']\nkeep = ['matmul']\n[[swap]]\n[[swap]]\nwhat = 'optimizer'\n"
        "[optimizer]\nin_backward = true\n[compress]"
    )
    assert emitted.expressed == 0
    assert len(emitted.cannot) == 8
    assert all(sentence.endswith(".") and ": " in sentence for sentence in emitted.cannot)


@pytest.mark.parametrize(
    "plan",
    [
        "[checkpoint]\nmodules = ['layers.*']\n[precision]\ndtype = 'bf16'",
        "[compile]\nmodules = ['layers.*']\nactivation_budget = 0.5\n[loss]\nchunks = 4",
    ],
)
def test_torchtitan_takes_what_is_written(plan: str) -> None:
    """torchtitan's own classes take it, where torchtitan is installed."""
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    from torchtitan.trainer import Trainer

    made = under_plan(emit(plan), Trainer.Config(optimizer=SimpleNamespace(implementation="fused")))
    made.__post_init__()
    assert type(made.activation_checkpoint).__qualname__ in ("FullAC.Config", "MemoryBudgetAC.Config")
