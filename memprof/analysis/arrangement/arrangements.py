"""The fastest arrangements of a recorded job over many devices, and what applies each part, memprof or torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memprof.analysis.plans.basis import Basis
from memprof.errors import InvariantError, PolicyError
from memprof.machines.catalogue import Accelerator
from memprof.planners.arrangement.arrangement import DEVICES_PER_NODE, NODE_GIGABYTES_PER_SECOND, Arrangement, Cluster
from memprof.planners.arrangement.balance import split_by_count, split_by_peak, split_by_time
from memprof.planners.arrangement.layer_costs import LayerCosts, scale_costs
from memprof.planners.arrangement.read_layers import read_layers
from memprof.planners.arrangement.search import Arranged, ArrangementSearch, Question, arrange, find_arrangements
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.shard.policy import Shard
from memprof.policies.swap.policy import Swap
from memprof.trace.step import Step

#: How many arrangements are shown, and so replayed where memprof applies them.
MOST_SHOWN = 12


@dataclass(frozen=True)
class Proposal:
    """An arrangement, and how it is carried out.

    Attributes:
        arranged: The arrangement, its modelled memory and time.
        plan: The plan that memprof applies, with its prediction; None where it does not.
        why_not: Why memprof does not apply it, a clause; "" where it does.
        calls: What carries it out in torch.
    """

    arranged: Arranged
    plan: Plan | None
    why_not: str
    calls: tuple[str, ...]

    @property
    def source(self) -> str:
        """How its figures were obtained, one of policies.base.SOURCES."""
        return "modelled" if self.plan is None else "replayed"

    @property
    def peak_bytes(self) -> int:
        """The worst rank's peak: replayed where memprof applies the arrangement, else modelled."""
        if self.plan is not None and self.plan.prediction is not None:
            return self.plan.prediction.peak_allocated_bytes
        return self.arranged.peak_bytes

    @property
    def step_us(self) -> float:
        """The step time, likewise."""
        if self.plan is not None and self.plan.prediction is not None:
            return self.plan.prediction.step_time_us
        return self.arranged.times.step_us

    @property
    def samples_per_second(self) -> float:
        """Samples per second over all devices, likewise."""
        return self.arranged.samples / self.step_us * 1e6 if self.step_us > 0 else 0.0


@dataclass(frozen=True)
class Balance:
    """Peaks of the stages of a pipeline, for each of several splits of the layers.

    Attributes:
        chosen: The arrangement as found, its split by time or by peak.
        equal: The same with as many layers on each stage.
        levelled: The same with the split whose fullest stage holds least.
    """

    chosen: Arranged
    equal: Arranged
    levelled: Arranged


@dataclass(frozen=True)
class Arrangements:
    """The arrangements found.

    Attributes:
        question: What was searched for.
        search: All that were found.
        proposals: The fastest, with what carries them out.
        balance: The stages of the fastest pipeline; None without one.
        assumptions: What the figures rest on, sentences.
    """

    question: Question
    search: ArrangementSearch
    proposals: tuple[Proposal, ...]
    balance: Balance | None
    assumptions: tuple[str, ...]

    @property
    def best(self) -> Proposal | None:
        """The fastest whose replayed or modelled peak fits."""
        return next((each for each in self.proposals if each.peak_bytes <= self.question.budget_bytes), None)

    @property
    def applicable(self) -> Proposal | None:
        """The fastest that fits and that memprof applies."""
        fitting = (each for each in self.proposals if each.peak_bytes <= self.question.budget_bytes)
        return next((each for each in fitting if each.plan is not None), None)


@dataclass(frozen=True)
class ClusterRequest:
    """The devices to arrange a job over.

    Attributes:
        devices: Number of devices.
        per_node: Devices of a node.
        node_gigabytes_per_second: What each sends to other nodes.
        global_samples: Samples of an update over all devices; None for the recorded batch on each.
        fixed: Fields of the arrangement that are given, with their values.
    """

    devices: int
    per_node: int = DEVICES_PER_NODE
    node_gigabytes_per_second: float = NODE_GIGABYTES_PER_SECOND
    global_samples: int | None = None
    fixed: tuple[tuple[str, int], ...] = ()


def find_cluster(request: ClusterRequest, machine: Accelerator | None, link_bytes_per_us: float, step: Step) -> Cluster:
    """Returns the devices and their links.

    Args:
        request: How many.
        machine: The device, whose catalogued links are used; None for typical ones.
        link_bytes_per_us: Bandwidth to the host's memory.
        step: The recorded step.
    """
    peer = Shard.link_gigabytes_per_second * 1e3
    if machine is not None:
        peer = machine.peer_bytes_per_us or machine.host_bytes_per_us or peer
    is_device = machine is not None or step.is_on_device()
    return Cluster(
        request.devices,
        request.per_node,
        peer,
        request.node_gigabytes_per_second * 1e3,
        link_bytes_per_us if is_device else 0.0,  # nothing can be moved to the host from a job in its memory
    )


def find_proposals(
    basis: Basis, cluster: Cluster, budget_bytes: int, request: ClusterRequest, *, deadline: float, trace: str = ""
) -> Arrangements:
    """Finds the fastest arrangements that fit, and replays those that memprof applies.

    Args:
        basis: The recorded step, of one device.
        cluster: The devices.
        budget_bytes: Memory of each.
        request: How many samples an update has, and what of the arrangement is given.
        deadline: ``time.monotonic`` value after which nothing new is tried.
        trace: Name of the recording.

    Raises:
        PolicyError: The step cannot be arranged: it accumulates, or communicates already.
    """
    costs = read_layers(basis.step)
    samples = request.global_samples or costs.samples * cluster.devices
    question = Question(costs, cluster, budget_bytes, samples, deadline, request.fixed)
    search = find_arrangements(question)
    shown = search.fitting[:MOST_SHOWN]
    first = next((each for each in search.fitting if each.arrangement.is_data_parallel), None)
    if first is not None and first not in shown:
        shown = (*shown[:-1], first)
    proposals = sorted((_propose(basis, question, each, trace) for each in shown), key=lambda each: each.step_us)
    return Arrangements(question, search, tuple(proposals), _balance(question, search), _assumptions(basis, question))


def _propose(basis: Basis, question: Question, arranged: Arranged, trace: str) -> Proposal:
    arrangement = arranged.arrangement
    calls = torch_calls(arrangement)
    own = question.samples // arrangement.data
    if not arrangement.is_data_parallel:
        return Proposal(arranged, None, "memprof divides batches and model state only", calls)
    if own != question.costs.samples:
        return Proposal(
            arranged, None, f"the script's batch must be {own:,} samples first, not {question.costs.samples:,}", calls
        )
    try:
        plan, _ = basis.predict(Plan(_policies(question.costs, arrangement, question.cluster)), trace)
    except (PolicyError, InvariantError) as error:
        return Proposal(arranged, None, str(error).rstrip("."), calls)
    return Proposal(arranged, replace(plan, budget_bytes=question.budget_bytes), "", calls)


def _policies(costs: LayerCosts, arrangement: Arrangement, cluster: Cluster) -> tuple[Policy, ...]:
    """Returns the policies of a data-parallel arrangement.

    Raises:
        PolicyError: No policy of memprof does what it asks for.
    """
    found: list[Policy] = []
    if arrangement.data > 1:
        link = cluster.group(arrangement.data, 1)
        found.append(
            Shard(
                arrangement.zero,
                arrangement.data,
                link_gigabytes_per_second=link.bytes_per_us / 1e3,
                link_latency_us=link.latency_us,
            )
        )
    if arrangement.micro_batches > 1:
        found.append(Accumulate(arrangement.micro_batches))
    layers = costs.names[1:-1]
    if arrangement.checkpointed != "none":
        found.append(Checkpoint(modules=layers if arrangement.checkpointed == "all" else layers[::2]))
    if arrangement.offloaded == "activations":
        found.append(Swap(modules=layers))
    if arrangement.offloaded == "optimizer":
        raise PolicyError("optimizer state in host memory cannot be combined with sharding")
    return tuple(found)


def _balance(question: Question, search: ArrangementSearch) -> Balance | None:
    """Returns the stages of the fastest pipeline, under 1F1B where that interleaves several chunks on a rank."""
    candidates = search.fitting or ((search.nearest,) if search.nearest else ())
    chosen = next((each for each in candidates if each.arrangement.pipeline > 1), None)
    if chosen is None:
        return None
    arrangement, costs = chosen.arrangement, question.costs
    scaled = scale_costs(costs, arrangement, question.cluster)
    if arrangement.chunks > 1:
        split = split_by_time(scaled.forward_us + scaled.backward_us, arrangement.pipeline)
        chosen = arrange(question, replace(arrangement, schedule="1F1B", split=split))
        arrangement = chosen.arrangement
    equal = replace(arrangement, split=split_by_count(len(costs.names), arrangement.pipeline))
    levelled = replace(arrangement, split=split_by_peak(costs, scaled, arrangement))
    return Balance(chosen, arrange(question, equal), arrange(question, levelled))


def _assumptions(basis: Basis, question: Question) -> tuple[str, ...]:
    costs, cluster = question.costs, question.cluster
    times = "scaled to the device (modelled)" if basis.elsewhere is not None else "those of the recording"
    if not basis.has_measured_times and basis.elsewhere is None:
        times = "modelled: the recording has none of a real run"
    shares = "a micro-batch takes its share of the recorded batch's time and activations"
    peer, node = cluster.peer_bytes_per_us / 1e3, cluster.node_bytes_per_us / 1e3
    links = (
        f"links carry {peer:g} GB/s inside a node of {cluster.per_node} and {node:g} GB/s from each device to others"
    )
    found = [f"times of operators are {times}; {shares}", f"{links}, without contention"]
    if costs.experts:
        found.append("tokens are divided evenly between experts")
    if costs.layers == 0:
        found.append("no layers that run one after the other were found, so nothing is divided but the batch and state")
    return tuple(found)


#: What carries each part out in torch, by the field of an arrangement.
_CALLS = {
    "pipeline": (
        "torch.distributed.pipelining.PipelineStage and Schedule{schedule}(stage, n_microbatches={micro_batches})"
    ),
    "tensor": (
        'torch.distributed.tensor.parallel.parallelize_module(layer, mesh["tp"], ...) with ColwiseParallel, '
        "RowwiseParallel and SequenceParallel"
    ),
    "context": (
        'torch.distributed.tensor.experimental.context_parallel(mesh["cp"], buffers=...) around forward and backward'
    ),
    "expert": "torch.distributed.all_to_all_single before and after the experts, each rank with its own",
}
_STATE_CALLS = (
    "torch.nn.parallel.DistributedDataParallel(model)",
    "torch.distributed.optim.ZeroRedundancyOptimizer(parameters, ...)",
    "torch.distributed.fsdp.fully_shard(layer, reshard_after_forward=False)",
    "torch.distributed.fsdp.fully_shard(layer)",
)
_CHECKPOINT_CALL = "torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) in {which}"
_OFFLOAD_CALLS = {
    "optimizer": "an optimizer whose state is in host memory, such as torchao.optim.CPUOffloadOptimizer",
    "activations": "torch.autograd.graph.save_on_cpu(pin_memory=True) around each layer",
}


def torch_calls(arrangement: Arrangement) -> tuple[str, ...]:
    """Returns what carries an arrangement out in torch, a call for each part of it."""
    dims = [
        (name, ranks)
        for name, ranks in (
            ("pp", arrangement.pipeline),
            ("dp", arrangement.data),
            ("cp", arrangement.context),
            ("tp", arrangement.tensor),
        )
        if ranks > 1
    ]
    found = []
    if len(dims) > 1:
        sizes, names = tuple(ranks for _, ranks in dims), tuple(name for name, _ in dims)
        found.append(f'torch.distributed.device_mesh.init_device_mesh("cuda", {sizes}, mesh_dim_names={names})')
    for name, call in _CALLS.items():
        if getattr(arrangement, name) > 1:
            found.append(call.format(schedule=arrangement.schedule, micro_batches=arrangement.micro_batches))
    if arrangement.shards > 1:
        found.append(_STATE_CALLS[arrangement.zero])
    if arrangement.checkpointed != "none":
        which = "every layer" if arrangement.checkpointed == "all" else "every second layer"
        found.append(_CHECKPOINT_CALL.format(which=which))
    if arrangement.offloaded in _OFFLOAD_CALLS:
        found.append(_OFFLOAD_CALLS[arrangement.offloaded])
    if arrangement.pipeline == 1 and arrangement.micro_batches > 1:
        found.append(f"{arrangement.micro_batches} rounds of forward and backward before optimizer.step()")
    return tuple(found)
