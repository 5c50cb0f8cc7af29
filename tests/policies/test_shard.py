"""Sharding: the memory of one rank matches the papers' formulas, and collectives overlap the computation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import PolicyError
from memprof.policies.runtime.job import Job
from memprof.policies.shard.division import Ring, find_units
from memprof.policies.shard.policy import Shard
from memprof.policies.shard.predicted_sharding import Timeline
from memprof.replay.live import alive_at, live_bytes
from memprof.trace.step import Step
from tests.building import Module, Op, Storage, make_step
from tests.policies import faces
from tests.policies.faces import peaks

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
    return faces.recorded("gpt")


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"world_size": 0}, "at least 1 rank"),
        ({"world_size": -2}, "write world_size = 8"),
        ({"world_size": 2.0}, "at least 1 rank"),
        ({"stage": 4}, r"write 0 \(ddp\), 1, 2 or 3"),
        ({"bucket_mib": 0}, "at least 1 MiB"),
        ({"batch": "half"}, "write batch = 'keep' or batch = 'split'"),
        ({"link_gigabytes_per_second": 0.0}, "a positive link bandwidth"),
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
    assert Shard.from_flag("3:8:split") == Shard(stage=3, world_size=8, batch="split")
    assert Shard.from_flag("zero1:4").describe() == "shard zero1 over 4 ranks"
    for text in ("fsdp", "fsdp:many", "tensor:2", ""):
        with pytest.raises(PolicyError, match="write --shard fsdp:8"):
            Shard.from_flag(text)
    with pytest.raises(PolicyError, match="at least 1 rank"):
        Shard.from_flag("fsdp:0")


def test_one_process_is_no_job_of_many_ranks() -> None:
    """Without torchrun the sentence says how to start; of one rank there is nothing to divide."""
    for stage in range(4):
        model = torch.nn.Linear(1, 1)
        job = Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        with pytest.raises(PolicyError, match="a single process: start it with torchrun --nproc-per-node 2"):
            Shard(stage=stage, world_size=2).apply(job)
        Shard(stage=stage).apply(job)
        assert job.notes == ["shard has one rank: nothing is sharded, and the job runs unchanged."]


def test_a_unit_that_is_no_module_is_refused() -> None:
    """A pattern that matches nothing says what is near."""
    with pytest.raises(PolicyError, match=r"no module of the model matches 'layer\.\*'"):
        Shard(world_size=2, units=("layer.*",)).transform(mixed_step())


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 16, 64])
def test_model_states_follow_the_formulas_of_zero(ranks: int) -> None:
    """Rajbhandari et al. 2020, figure 1: 16 bytes a parameter; 4 + 12/N with stage 1 and 16/N with stage 3.

    In stage 2, fully_shard keeps parameters sharded during the update, too; ZeRO, with whole parameters, has 2 + 14/N.
    """
    parameters = 2 * LAYER + HEAD
    step = mixed_step()
    assert held_at_update(step) == 16 * parameters
    held = {stage: held_at_update(Shard(stage=stage, world_size=ranks).transform(step)) for stage in range(4)}
    assert held == {
        0: 16 * parameters,
        1: 4 * parameters + 12 * parameters // ranks,
        2: 16 * parameters // ranks,
        3: 16 * parameters // ranks,
    }


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_recorded_step_in_fp32_follows_them_too(recorded: Step, ranks: int) -> None:
    """Adam in fp32: 4 bytes a parameter, 4 a gradient, 8 of state, and one step counter of 4 for each parameter.

    All of the GPT's first dimensions divide by 8: 16 bytes; 8 + 8/N with stage 1; 16/N with stages 2 and 3.
    """
    storages = recorded.storages
    parameters = int(storages.allocated_bytes[storages.category == "parameter"].sum()) // 4
    counters = 4 * int((storages.category == "parameter").sum())

    def states(step: Step) -> int:
        update = np.flatnonzero(step.ops.phase == "optimizer")[0]
        is_state = np.isin(step.storages.category, ("parameter", "gradient", "optimizer_state"))
        return int(step.storages.allocated_bytes[is_state & alive_at(step, int(update))].sum())

    assert states(recorded) == 16 * parameters + counters
    held = [states(Shard(stage, ranks).transform(recorded)) - counters for stage in range(4)]
    divided = 16 * parameters // ranks
    assert held == [16 * parameters, 8 * parameters + 8 * parameters // ranks, divided, divided]


def test_the_ring_moves_what_the_formula_says() -> None:
    """An all-reduce of S bytes over N ranks: each sends 2(N - 1)/N of S, at 1 byte a microsecond without latency."""
    size = 4 * 900
    for ranks in (2, 3, 1024):
        ring = Ring(ranks, bytes_per_us=1.0, latency_us=0.0)
        assert ring.all_reduce_us(size) == pytest.approx(2 * (ranks - 1) / ranks * size)
        assert ring.all_gather_us(size) == ring.reduce_scatter_us(size) == pytest.approx((ranks - 1) / ranks * size)


def test_a_first_dimension_that_does_not_divide_is_rounded_up() -> None:
    """FSDP2 gives the first ranks ceil(64 / 48) = 2 rows, so 32 ranks' worth; more ranks than rows still get one."""
    parameters = 2 * LAYER + HEAD
    assert held_at_update(Shard(stage=3, world_size=48).transform(mixed_step())) == 16 * parameters // 32
    assert held_at_update(Shard(stage=3, world_size=1000).transform(mixed_step())) == 16 * parameters // 64


def gathered(step: Step, place: int, phase: str = "forward") -> list[int]:
    """Bytes of what is gathered while one of the step's own products runs, in the order in which it was made."""
    products = np.flatnonzero((step.ops.phase == phase) & (step.ops.name == "aten.mm.default"))
    whole = alive_at(step, int(products[place])) & (step.storages.category == "collective")
    return step.storages.take(whole).allocated_bytes.tolist()


def test_fsdp_gathers_a_unit_before_it_is_at_work() -> None:
    """The root's parameters, the head's, are gathered first and stay until the end of backward.

    A layer's are copied out of a buffer that lives until the next unit's copy, the last one's until forward ends; in
    backward a buffer is freed once it has been copied, while the next layer's is being gathered.
    """
    step = Shard(stage=3, world_size=4).transform(mixed_step())
    assert gathered(step, 0) == [2 * HEAD, 2 * LAYER, 2 * LAYER]
    assert gathered(step, 1) == [2 * HEAD, 2 * LAYER, 2 * LAYER]
    assert gathered(step, 2) == [2 * HEAD, 2 * LAYER]
    assert gathered(step, 0, "backward") == [2 * HEAD, 2 * LAYER]
    assert gathered(step, 1, "backward") == [2 * HEAD, 2 * LAYER, 2 * LAYER]


def test_stage_2_keeps_what_it_gathered_until_backward_is_through() -> None:
    """As does stage 3 without resharding: each unit is gathered once, and the layers' parameters stay."""
    for policy in (Shard(2, 4), Shard(3, 4, reshard_after_forward=False)):
        step = policy.transform(mixed_step())
        assert (step.ops.name == "c10d._allgather_base_").sum() == 3
        assert gathered(step, 2) == [2 * HEAD, 2 * LAYER, 2 * LAYER, 2 * LAYER]
        assert gathered(step, 1, "backward") == [2 * HEAD, 2 * LAYER, 2 * LAYER]
    assert (Shard(3, 4).transform(mixed_step()).ops.name == "c10d._allgather_base_").sum() == 5


def test_more_ranks_hold_less(recorded: Step) -> None:
    """On a recorded GPT the peak falls with the ranks, and so does what lives between steps; that falls by stage too.

    As long as there are rows to divide: 96 over 1,024 ranks are padded to 1,024 where they are gathered.
    """
    sizes = (2, 3, 4, 8, 64)
    between, highest = {}, {}
    for stage in range(4):
        for ranks in sizes:
            step = Shard(stage=stage, world_size=ranks).transform(recorded)
            step.check()
            between[stage, ranks], highest[stage, ranks] = step.bytes_at_start(), peaks(step)[0]
    for held in (between, highest):
        for stage in range(4):
            by_ranks = [held[stage, ranks] for ranks in sizes]
            assert by_ranks == sorted(by_ranks, reverse=True)
    for ranks in (2, 4, 64):
        by_stage = [between[stage, ranks] for stage in range(4)]
        assert by_stage == sorted(by_stage, reverse=True)


def test_layers_are_the_units_of_a_transformer(recorded: Step) -> None:
    """By default each layer of a module list is a unit, and the embeddings and the head are the root's."""
    units = find_units(recorded, ())
    assert units.count == 5
    starts = units.first_forward
    assert starts[0] < starts[1] < starts[2] < starts[3] < starts[4]
    assert units.last_backward[1] > units.last_backward[4]


# -- collectives and time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "count"), [(0, 1), (1, 2), (2, 6), (3, 8)])
def test_collectives_run_on_their_own_stream(stage: int, count: int) -> None:
    """Each is an operator of kind collective on stream 1; they fill buffers, or sum gradients."""
    step = Shard(stage=stage, world_size=4).transform(mixed_step())
    is_collective = step.ops.kind == "collective"
    assert is_collective.sum() == count
    assert set(step.ops.stream[is_collective]) == {1}
    made = step.uses.storage_id[np.isin(step.uses.op_id, np.flatnonzero(is_collective)) & (step.uses.role != "read")]
    assert set(step.storages.category[made]) <= {"collective", "gradient"}


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
