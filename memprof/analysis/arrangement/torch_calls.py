"""What carries out an arrangement in torch."""

from __future__ import annotations

from memprof.planners.arrangement.arrangement import Arrangement

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
