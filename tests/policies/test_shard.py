"""Sharding: what one rank holds is what the papers' formulas say, and collectives hide behind the computation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import PolicyError
from memprof.policies.job import Job
from memprof.policies.shard.policy import Shard
from memprof.policies.shard.ring import Ring
from memprof.policies.shard.timeline import Timeline
from memprof.policies.shard.units import find_units
from memprof.replay.live import alive_at, live_bytes
from memprof.trace.schema import Table
from memprof.trace.step import Step
from tests.building import Module, Op, Storage, make_step
from tests.policies.faces import peaks, record_step

#: Parameters of each of two layers, and of the root's own head.
LAYER, HEAD = 64 * 128, 64 * 16


def mixed_step() -> Step:
    """A step in mixed precision as the ZeRO paper counts it: 2 bytes a parameter, 2 a gradient, 12 of state."""
    storages, forward, backward, update = [], [], [], []
    sizes = {"layers.0": (LAYER, "64x128"), "layers.1": (LAYER, "64x128"), "head": (HEAD, "64x16")}
    for name, (count, shape) in sizes.items():
        storages += [
            Storage(f"p {name}", 2 * count, "parameter", f"{name}.weight", name, shape=shape, dtype="float16"),
            Storage(f"g {name}", 2 * count, "gradient", f"{name}.weight", name, shape=shape, dtype="float16"),
            Storage(f"a {name}", 4096, "activation", module=name, shape="8x256", dtype="float16"),
        ]
        storages += [
            Storage(f"{key} {name}", 4 * count, "optimizer_state", f"{name}.weight.{key}", name, shape=shape)
            for key in ("master", "momentum", "variance")
        ]
    for number, name in enumerate(sizes):
        forward.append(Op("aten.mm.default", "forward", name, [f"a {name}"], [f"p {name}"], duration_us=100))
        place = 2 * len(sizes) - 1 - number
        backward.append(
            Op(
                "aten.mm.default",
                "backward",
                name,
                [f"g {name}"],
                [f"p {name}", f"a {name}"],
                frees=[f"a {name}"],
                forward=number,
                duration_us=200,
            )
        )
        assert place >= len(sizes)
        state = [f"{key} {name}" for key in ("master", "momentum", "variance")]
        update.append(
            Op(
                "aten.add_.Tensor",
                "optimizer",
                None,
                reads=[f"g {name}"],
                mutates=[f"p {name}", *state],
                duration_us=50,
            )
        )
    modules = [
        Module("", "Net"),
        Module("layers", "ModuleList"),
        *(Module(name, "Linear", 2 * count) for name, (count, _) in sizes.items()),
    ]
    return make_step([*forward, *reversed(backward), *update], storages, modules=modules)


def held_at_update(step: Step) -> int:
    """Bytes alive while the optimizer runs."""
    return int(live_bytes(step).before[np.flatnonzero(step.ops.phase == "optimizer")[0]])


@pytest.fixture(scope="module")
def recorded() -> Step:
    return record_step("gpt")


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"world_size": 0}, "at least 1 rank"),
        ({"world_size": -2}, "write world_size = 8"),
        ({"world_size": 2.0}, "at least 1 rank"),
        ({"stage": 4}, r"stages 0 \(ddp\), 1, 2 and 3"),
        ({"bucket_mib": 0}, "at least 1 MiB"),
        ({"link_gigabytes_per_second": 0.0}, "a link that sends something"),
        ({"link_latency_us": -1.0}, "0 or more microseconds"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], sentence: str) -> None:
    """World size 0 and the like are refused with what to write."""
    with pytest.raises(PolicyError, match=sentence):
        Shard(**settings)


def test_the_flag_names_strategy_and_ranks() -> None:
    """--shard fsdp:8 is stage 3 over 8 ranks."""
    assert Shard.from_flag("fsdp:8") == Shard(stage=3, world_size=8)
    assert Shard.from_flag("ddp:2") == Shard(stage=0, world_size=2)
    assert Shard.from_flag("zero1:4").describe() == "shard zero1 over 4 ranks"
    for text in ("fsdp", "fsdp:many", "tensor:2", ""):
        with pytest.raises(PolicyError, match="write --shard fsdp:8"):
            Shard.from_flag(text)
    with pytest.raises(PolicyError, match="at least 1 rank"):
        Shard.from_flag("fsdp:0")


def test_apply_refuses_with_what_to_use_today() -> None:
    """Until memprof shards by itself, the sentence names torch's own."""
    for stage, name in enumerate(("DistributedDataParallel", "ZeroRedundancyOptimizer", "DeepSpeed", "fully_shard")):
        with pytest.raises(PolicyError, match=name):
            Shard(stage=stage, world_size=2).apply(Job(torch.nn.Linear(1, 1)))


def test_a_unit_that_is_no_module_is_refused() -> None:
    """A pattern that matches nothing says what is near."""
    with pytest.raises(PolicyError, match=r"No module of the model matches 'layer\.\*'"):
        Shard(world_size=2, units=("layer.*",)).transform(mixed_step())


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 16, 64])
def test_model_states_follow_the_formulas_of_zero(ranks: int) -> None:
    """Rajbhandari et al. 2020, figure 1: 16 bytes a parameter; 4 + 12/N, 2 + 14/N and 16/N with stages 1, 2 and 3."""
    parameters = 2 * LAYER + HEAD
    step = mixed_step()
    assert held_at_update(step) == 16 * parameters
    held = {stage: held_at_update(Shard(stage=stage, world_size=ranks).transform(step)) for stage in range(4)}
    assert held == {
        0: 16 * parameters,
        1: 4 * parameters + 12 * parameters // ranks,
        2: 2 * parameters + 14 * parameters // ranks,
        3: 16 * parameters // ranks,
    }


def test_a_first_dimension_that_does_not_divide_is_rounded_up() -> None:
    """FSDP2 gives the first ranks ceil(64 / 48) = 2 rows, so 32 ranks' worth; more ranks than rows still get one."""
    parameters = 2 * LAYER + HEAD
    assert held_at_update(Shard(stage=3, world_size=48).transform(mixed_step())) == 16 * parameters // 32
    assert held_at_update(Shard(stage=3, world_size=1000).transform(mixed_step())) == 16 * parameters // 64


def test_fsdp_holds_the_unit_at_work_and_the_next() -> None:
    """In the first layer's forward: its own parameters whole, the root's, and the second layer's on their way."""
    ranks = 4
    step = Shard(stage=3, world_size=ranks).transform(mixed_step())
    first = int(np.flatnonzero((step.ops.phase == "forward") & (step.ops.name == "aten.mm.default"))[0])
    whole = step.storages.take(alive_at(step, first) & (step.storages.category == "collective"))
    assert sorted(whole.allocated_bytes.tolist()) == [2 * LAYER, 2 * LAYER]
    head = int(np.flatnonzero((step.ops.phase == "forward") & (step.ops.name == "aten.mm.default"))[2])
    whole = step.storages.take(alive_at(step, head) & (step.storages.category == "collective"))
    # The layers have dropped theirs: only the root's own, and nothing comes after it.
    assert whole.allocated_bytes.tolist() == [2 * HEAD]
    kept = Shard(stage=3, world_size=ranks, reshard_after_forward=False).transform(mixed_step())
    assert (kept.ops.name == "c10d._allgather_base_").sum() == 3
    assert (step.ops.name == "c10d._allgather_base_").sum() == 5  # the root's is gathered once
    assert int(live_bytes(kept).during.max()) >= int(live_bytes(step).during.max())


def test_a_single_rank_holds_what_was_recorded(recorded: Step) -> None:
    """World size 1 leaves the peak and the time as they are."""
    for stage in range(4):
        step = Shard(stage=stage, world_size=1).transform(recorded)
        assert peaks(step) == peaks(recorded)
        assert step.duration_us == recorded.duration_us


def test_more_ranks_and_higher_stages_hold_less(recorded: Step) -> None:
    """On a recorded GPT the peak falls with the ranks and with the stage, and so does what lives between steps."""
    between, highest = {}, {}
    for stage in range(4):
        for ranks in (2, 3, 4, 8, 64):
            step = Shard(stage=stage, world_size=ranks).transform(recorded)
            step.check()
            between[stage, ranks], highest[stage, ranks] = step.bytes_at_start(), peaks(step)[0]
    for held in (between, highest):
        for stage in range(4):
            by_ranks = [held[stage, ranks] for ranks in (2, 3, 4, 8, 64)]
            assert by_ranks == sorted(by_ranks, reverse=True)
        for ranks in (2, 4, 64):
            by_stage = [held[stage, ranks] for stage in range(4)]
            assert by_stage == sorted(by_stage, reverse=True)


def test_the_recorded_step_stays(recorded: Step) -> None:
    """A transform is pure."""
    tables = [value for value in vars(recorded).values() if isinstance(value, Table)]
    before = [getattr(table, column.name).tobytes() for table in tables for column in table.columns()]
    for stage in range(4):
        Shard(stage=stage, world_size=4).transform(recorded)
    assert before == [getattr(table, column.name).tobytes() for table in tables for column in table.columns()]


def test_layers_are_the_units_of_a_transformer(recorded: Step) -> None:
    """By default each layer of a module list is a unit, and the embeddings and the head are the root's."""
    units = find_units(recorded, ())
    assert units.count == 5
    starts = units.first_forward
    assert starts[0] < starts[1] < starts[2] < starts[3] < starts[4]
    assert units.last_backward[1] > units.last_backward[4]


# -- collectives and time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "count"), [(0, 1), (1, 2), (2, 2), (3, 8)])
def test_collectives_run_on_their_own_stream(stage: int, count: int) -> None:
    """Each is an operator of kind collective on stream 1; their storages are of category collective."""
    step = Shard(stage=stage, world_size=4).transform(mixed_step())
    is_collective = step.ops.kind == "collective"
    assert is_collective.sum() == count
    assert set(step.ops.stream[is_collective]) == {1}
    made = step.uses.storage_id[np.isin(step.uses.op_id, np.flatnonzero(is_collective)) & (step.uses.role != "read")]
    assert set(step.storages.category[made]) <= {"collective"}


def test_ring_times_are_those_of_the_formulas() -> None:
    """Four ranks, 1 GB at 25 GB/s and 5 us: 3 messages of 10 ms each way."""
    ring = Ring(ranks=4, bytes_per_us=25e3, latency_us=5.0)
    assert ring.all_gather_us(10**9) == pytest.approx(3 * 5 + 3 / 4 * 40_000)
    assert ring.all_reduce_us(10**9) == pytest.approx(2 * 3 * 5 + 2 * 3 / 4 * 40_000)
    assert Ring(1, 25e3, 5.0).all_reduce_us(10**9) == 0


def test_only_what_does_not_hide_costs_time() -> None:
    """A collective sent before the last operator and needed after it costs what is longer than that operator."""
    step = mixed_step()
    operators, last = float(step.ops.duration_us.sum()), float(step.ops.duration_us[-1])
    factor = step.duration_us / operators
    for duration, tail in ((last * factor / 2, 0.0), (last * factor + 7, 7.0)):
        timeline = Timeline(step)
        timeline.send(len(step.ops) - 1, duration, len(step.ops))
        assert timeline.duration_us(step.ops.duration_us) == pytest.approx(step.duration_us + tail)


@given(latency=st.floats(0, 1e4), bandwidth=st.floats(0.1, 1e3), stage=st.integers(0, 3))
def test_a_slower_link_is_never_faster(latency: float, bandwidth: float, stage: int) -> None:
    """Step time grows with latency and falls with bandwidth; bytes do not depend on them."""
    step = mixed_step()

    def shard(latency: float, bandwidth: float) -> Step:
        return Shard(stage, 4, link_latency_us=latency, link_gigabytes_per_second=bandwidth).transform(step)

    one, slower = shard(latency, bandwidth), shard(latency * 2 + 1, bandwidth / 2)
    assert slower.duration_us >= one.duration_us - 1e-6
    assert peaks(one)[0] == peaks(slower)[0]
