"""Distributed scripts, dry-run rank by rank, and run on real ranks over gloo."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from memprof.analysis.allocator.device_verdict import dry_fit
from memprof.analysis.ranks.rank_report import compare_ranks, job_notes
from memprof.machines.outside import LAZY, NCCL, NCCL_PEER
from memprof.trace.store import Trace
from tests.recorder.recorded import record

pytestmark = pytest.mark.timeout(600)

_JOBS = Path(__file__).parent / "rank_jobs"
#: What gloo's threads still hold of small tensors, which varies from run to run.
_LATE_BYTES = 512
_EVEN = """
import torch, torch.distributed as dist, os
from torch.distributed.fsdp import fully_shard
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
words = [None]
if dist.get_rank() == 0:
    words = [32]
dist.broadcast_object_list(words)
net = torch.nn.Sequential(torch.nn.Linear(words[0], 64), torch.nn.Linear(64, 64)).to(f"cuda:{rank}")
assert next(net.parameters()).device == torch.device("cuda", rank) and torch.cuda.device_count() == 2
for layer in net:
    fully_shard(layer)
fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters())
for step in range(5):
    net(torch.randn(8, 32, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_COALESCED = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
net = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(net.parameters())
shards = [torch.empty(each.numel() // 2, device="cuda") for each in net.parameters()]
for step in range(4):
    net(torch.randn(8, 64, device="cuda")).square().mean().backward()
    with dist._coalescing_manager(async_ops=True) as works:
        for each in net.parameters():
            dist.all_reduce(each.grad)
    works.wait()
    with dist._coalescing_manager():
        for each, shard in zip(net.parameters(), shards):
            dist.reduce_scatter_tensor(shard, each.grad.flatten())
    with dist._coalescing_manager():
        for each, shard in zip(net.parameters(), shards):
            dist.all_gather_into_tensor(each.grad.view(-1), shard)
    dist.all_reduce_coalesced([each.grad for each in net.parameters()])
    optimizer.step()
"""
_KILLED = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("nccl")
groups = [dist.new_group([0, 1]) for _ in range(2)]
net = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(net.parameters())
for step in range(6):
    net(torch.randn(8, 64, device="cuda")).square().mean().backward()
    for group in (None, groups[0]):
        dist.all_reduce(net.weight.grad, group=group)
    if step == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(net.bias.grad, group=groups[1] if step == 2 else None)
    optimizer.step()
    optimizer.zero_grad()
"""
_MESHED = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
with torch.device("meta"):
    net = torch.nn.Sequential(torch.nn.Linear(32, 1024), torch.nn.Linear(1024, 32))
parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
fully_shard(net, mesh=mesh["dp"])
net.to_empty(device="cuda")
for layer in net:
    layer.reset_parameters()
assert next(net.parameters()).device.type == "cuda"
optimizer = torch.optim.AdamW(net.parameters())
for step in range(5):
    net(torch.randn(8, 32, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_ALONE = """
import torch
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(5):
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""
_SPAWNS = """
import torch

def train(rank):
    torch.distributed.init_process_group("gloo", init_method="tcp://localhost:29511", rank=rank, world_size=2)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(5):
        net(torch.randn(8, 64)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""
_SPLIT = """
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
assert dist.get_process_group_ranks(half) == ([0, 1] if dist.get_rank() < 2 else [2, 3])
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(5):
    out = net(torch.randn(8, 64, device="cuda"))
    dist.all_to_all_single(torch.empty_like(out), out.detach(), group=half)
    out.sum().backward()
    dist.all_reduce(net.weight.grad)
    optimizer.step()
"""


def _peaks(trace: Trace) -> dict[int, int]:
    return {one.rank: one.peak_bytes or 0 for one in compare_ranks(trace).ranks}


def test_ranks_that_do_the_same_are_run_once_and_reported(tmp_path: Path) -> None:
    """Of 4 ranks on 2 nodes of 2 virtual GPUs, the first and the last are run: on devices 0 and 1.

    What rank 0 broadcasts, the other receives; both hold the same bytes.
    """
    (tmp_path / "job.py").write_text(_EVEN)
    ended = record(tmp_path, "--dry-run", "--device", "rtx4090", "--ranks", "4", "--nodes", "2", "job.py")
    trace = ended.trace
    assert trace.ranks == (0, 3)
    peaks = _peaks(trace)
    assert peaks[0] == peaks[3]
    assert {one.rank: one.device for one in compare_ranks(trace).ranks} == {0: "cuda:0", 3: "cuda:1"}
    assert trace.manifest_of(0).same_ranks == (1, 2)
    assert trace.manifest_of(3).same_ranks == ()
    assert trace.manifest.dry_ranks == 4
    assert "rank 0 for ranks 0 to 2, which do the same; rank 3" in " ".join(job_notes(trace))


def test_collectives_on_several_tensors_at_once_take_nothing(tmp_path: Path) -> None:
    """torch has no kernels for them on tensors without memory."""
    (tmp_path / "job.py").write_text(_COALESCED)
    trace = record(tmp_path, "--dry-run", "--device", "rtx4090", "--ranks", "2", "job.py").trace
    step = trace.steady_step()
    names = {name.split(".")[1] for name in step.ops.name}
    kinds = ("allreduce", "reduce_scatter_tensor", "allgather_into_tensor")
    assert {f"{kind}_coalesced_" for kind in kinds} <= names


@pytest.mark.slow
def test_a_mesh_creates_the_group_and_weights_are_drawn_on_the_device(tmp_path: Path) -> None:
    """Without init_process_group, from meta tensors: tensor parallelism inside FSDP; a quarter of the weights each."""
    (tmp_path / "job.py").write_text(_MESHED)
    trace = record(tmp_path, "--dry-run", "--device", "rtx4090", "--ranks", "4", "job.py").trace
    assert trace.manifest.world_size == 4
    assert len(set(_peaks(trace).values())) == 1
    storages = trace.steady_step().storages
    weights = int(storages.requested_bytes[storages.category == "parameter"].sum())
    assert weights == 4 * (2 * 32 * 1024 + 1024 + 2 * 32) // 4


def test_a_script_without_ranks_is_refused(tmp_path: Path) -> None:
    """One sentence with what to do instead, and status 125."""
    (tmp_path / "job.py").write_text(_ALONE)
    ended = record(tmp_path, "--dry-run", "--ranks", "8", "job.py")
    assert ended.returncode == 125
    assert "job.py never called torch.distributed.init_process_group" in ended.stderr
    assert "--shard ddp:8" in ended.stderr
    assert not ended.path.exists()


@pytest.mark.slow
def test_ranks_that_a_script_spawns_are_run_in_place_of_its_processes(tmp_path: Path) -> None:
    """With --ranks the function runs in each rank's process, to the same peak; another number of ranks is refused."""
    (tmp_path / "job.py").write_text(_SPAWNS)
    given = record(tmp_path, "--dry-run", "--ranks", "2", "job.py", name="given.memprof")
    spawned = record(tmp_path, "--dry-run", "job.py", name="spawned.memprof")
    assert given.trace.ranks == spawned.trace.ranks == (0, 1)
    assert _peaks(given.trace) == _peaks(spawned.trace)
    ended = record(tmp_path, "--dry-run", "--ranks", "4", "job.py", name="four.memprof")
    assert ended.returncode == 125
    assert "the job starts 2 processes on each node, but --ranks and --nodes give each 4: use --ranks 2" in ended.stderr


@pytest.mark.slow
def test_split_groups_and_communicators_are_counted(tmp_path: Path) -> None:
    """Two halves of the group of all ranks, one of them this rank's: two communicators, one of which sends to a peer.

    A half's all-to-all connects the rank to its one other member, which is on the same node.
    """
    (tmp_path / "job.py").write_text(_SPLIT)
    trace = record(tmp_path, "--dry-run", "--device", "rtx4090", "--ranks", "4", "job.py").trace
    made = trace.manifest_of(3).communicators
    assert (made.count, made.near_peers, made.sending_far) == (2, 1, 0)
    fit = dry_fit(trace.rank_trace(3))
    assert fit is not None
    assert fit.least_outside_bytes == LAZY.least_bytes + 2 * NCCL.least_bytes + NCCL_PEER.least_bytes
    assert "2 NCCL communicators" in fit.parts


def test_a_killed_rank_counts_its_communicators(tmp_path: Path) -> None:
    """Rank 1 is killed after the collectives of two groups, of which rank 0 also used a third: it counts three."""
    (tmp_path / "job.py").write_text(_KILLED)
    ran = record(tmp_path, "--dry-run", "--device", "rtx4090", "--ranks", "2", "job.py")
    assert ran.returncode == -signal.SIGKILL
    trace = Trace.open(ran.path)
    whole, killed = (trace.manifest_of(rank).communicators for rank in (0, 1))
    assert (whole.count, whole.is_assumed) == (3, False)
    assert (killed.count, killed.is_assumed) == (3, True)
    fit = dry_fit(trace.rank_trace(1))
    assert fit is not None
    assert fit.least_outside_bytes == LAZY.least_bytes + 3 * NCCL.least_bytes
    assert "3 NCCL communicators as on the rank with the most: this one was ended early" in fit.parts


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["bf16", "power"])
def test_communication_hooks_run_on_a_virtual_gpu(tmp_path: Path, hook: str) -> None:
    """Hooks that need NCCL, or that gloo cannot run; PowerSGD keeps an error of the gradients' size from its step 3."""
    words = ("--dry-run", "--device", "rtx4090", "--ranks", "2", str(_JOBS / "ddp.py"), hook)
    trace = record(tmp_path, *words).trace
    assert trace.ranks == (0, 1)
    assert trace.manifest_of(1).communicators.count == 1  # of the gradients


@pytest.mark.slow
@pytest.mark.parametrize(("count", "load"), [("count", 1.0), ("mask", 1.5), ("histogram", 1.5), ("gather", 1.5)])
def test_tokens_of_experts_are_divided_with_the_stated_load(tmp_path: Path, count: str, load: float) -> None:
    """The first of two real ranks, sent the load of the words, has the peak of a dry run.

    gloo's threads may still hold what one exchange sent (256 words) and received (256 times the load).
    """
    words = (str(_JOBS / "experts.py"), count, str(load))
    real = record(tmp_path, "--stop", "--", *_torchrun(2), *words, name="real.memprof")
    dry = record(tmp_path, "--dry-run", "--ranks", "2", "--expert-load", str(load), *words, name="dry.memprof")
    measured, expected = _peaks(real.trace), _peaks(dry.trace)
    exchanged = int(256 * (1 + load)) * 64 * 4
    assert -_LATE_BYTES <= measured[0] - expected[0] <= exchanged + _LATE_BYTES
    assert f"receive {load:g} times their equal share" in " ".join(dry.trace.manifest.notes)


def test_a_load_of_experts_needs_a_dry_run(tmp_path: Path) -> None:
    """A real run routes its tokens itself."""
    (tmp_path / "job.py").write_text(_ALONE)
    ended = record(tmp_path, "--expert-load", "1.5", "job.py")
    assert ended.returncode == 125
    assert "--expert-load is for dry runs, which compute no routing: add --dry-run." in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "ranks", "late_bytes"),
    [
        ("ddp.py", 2, 0),
        ("ddp.py view", 2, 0),
        ("ddp.py static", 2, 0),
        ("ddp.py unused", 2, 0),
        ("ddp.py zero", 2, 0),
        ("ddp.py fp16", 2, 1_100_000),  # the short copies of all gradients
        ("fsdp.py mixed", 2, 0),
        ("fsdp.py prefetch", 2, 0),
        ("fsdp.py old", 2, 0),
        ("fsdp.py old_grad", 2, 0),
        ("tensors.py", 2, 65_536),
        ("tensors.py two", 4, 0),
        ("stages.py gpipe", 2, 0),
        ("stages.py 1f1b", 3, 0),
        ("stages.py interleaved", 2, 0),
        ("stages.py zero_bubble", 2, 0),
        ("combined.py no_sync", 2, 0),
        ("combined.py late", 2, 0),
        ("combined.py recomputed", 2, 262_144),
        ("combined.py grid", 4, 0),
        ("combined.py v", 2, 0),
    ],
)
def test_each_rank_has_the_peak_of_a_real_one(tmp_path: Path, job: str, ranks: int, late_bytes: int) -> None:
    """Real ranks send through gloo; a dry run of each has the peak to the byte, but for what gloo's threads hold.

    Of functional collectives, they release a whole activation of 64 KiB before or after the peak, and of gathers that
    are followed at once by a recomputed layer, a layer or two; a communication hook runs in one of these threads, and a
    bucket may be copied after it.
    """
    script, *words = job.split()
    words = [str(_JOBS / script), *words]
    real = record(tmp_path, "--stop", "--", *_torchrun(ranks), *words, name="real.memprof")
    dry = record(tmp_path, "--dry-run", "--ranks", str(ranks), *words, name="dry.memprof")
    measured, expected = _peaks(real.trace), _peaks(dry.trace)
    for rank in dry.trace.ranks:
        for alike in (rank, *dry.trace.manifest_of(rank).same_ranks):
            assert -late_bytes <= measured[alike] - expected[rank] <= _LATE_BYTES + late_bytes, (
                alike,
                measured,
                expected,
            )


@pytest.mark.slow
def test_ranks_under_torchrun_are_all_dry_run(tmp_path: Path) -> None:
    """torchrun starts each rank, which is dry-run on its own virtual GPU."""
    words = ("--dry-run", "--device", "rtx4090", "--", *_torchrun(2), str(_JOBS / "stages.py"), "1f1b")
    trace = record(tmp_path, *words).trace
    assert trace.ranks == (0, 1)


def _torchrun(ranks: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
