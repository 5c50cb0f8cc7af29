"""A GPT or mixture of experts trained as Megatron-Core's `pretrain_gpt.py` trains it, with random tokens.

Options are named as Megatron-LM's.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as groups
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

_FLAGS = ("sequence-parallel", "use-distributed-optimizer", "swiglu", "overlap-grad-reduce", "overlap-param-gather")


def options() -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser()
    for name, default in {
        "tensor-model-parallel-size": 1,
        "pipeline-model-parallel-size": 1,
        "context-parallel-size": 1,
        "expert-model-parallel-size": 1,
        "virtual-stages": 0,
        "num-experts": 0,
        "moe-router-topk": 2,
        "num-layers": 4,
        "hidden-size": 256,
        "num-attention-heads": 8,
        "num-query-groups": 0,
        "ffn-hidden-size": 0,
        "seq-length": 128,
        "vocab-size": 1024,
        "micro-batch-size": 1,
        "global-batch-size": 8,
        "train-iters": 4,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in _FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--modules", nargs="+", default=["core_attn"], help="--recompute-modules")
    parser.add_argument("--spec", choices=("local", "te"), default="local", help="--transformer-impl")
    parser.add_argument("--fp8", choices=("hybrid", "e4m3"), help="--fp8-format, with delayed scaling")
    parser.add_argument("--dispatcher", default="alltoall", help="--moe-token-dispatcher-type")
    parser.add_argument("--grouped", action="store_true", help="--moe-grouped-gemm")
    return parser.parse_args()


args = options()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
groups.initialize_model_parallel(
    args.tensor_model_parallel_size,
    args.pipeline_model_parallel_size,
    args.virtual_stages or None,
    context_parallel_size=args.context_parallel_size,
    expert_model_parallel_size=args.expert_model_parallel_size,
    expert_tensor_parallel_size=1 if args.num_experts else None,
)
torch.manual_seed(1)
tensor_parallel.model_parallel_cuda_manual_seed(1)
experts: dict[str, Any] = {
    "num_moe_experts": args.num_experts,
    "moe_router_topk": args.moe_router_topk,
    "moe_token_dispatcher_type": args.dispatcher,
    "moe_grouped_gemm": args.grouped,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}
config = TransformerConfig(
    num_layers=args.num_layers,
    hidden_size=args.hidden_size,
    num_attention_heads=args.num_attention_heads,
    num_query_groups=args.num_query_groups or None,
    ffn_hidden_size=args.ffn_hidden_size or None,
    gated_linear_unit=args.swiglu,
    activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
    add_bias_linear=not args.swiglu and not args.num_experts,
    normalization="RMSNorm" if args.swiglu else "LayerNorm",
    bf16=True,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
    tensor_model_parallel_size=args.tensor_model_parallel_size,
    pipeline_model_parallel_size=args.pipeline_model_parallel_size,
    virtual_pipeline_model_parallel_size=args.virtual_stages or None,
    context_parallel_size=args.context_parallel_size,
    expert_model_parallel_size=args.expert_model_parallel_size,
    expert_tensor_parallel_size=1 if args.num_experts else None,
    sequence_parallel=args.sequence_parallel,
    recompute_granularity=None if args.recompute == "none" else args.recompute,
    recompute_method="uniform" if args.recompute == "full" else None,
    recompute_num_layers=1 if args.recompute == "full" else None,
    recompute_modules=args.modules if args.recompute == "selective" else None,
    fp8=args.fp8,
    fp8_recipe="delayed" if args.fp8 else None,
    bias_activation_fusion=True,
    masked_softmax_fusion=args.spec == "te",
    bias_dropout_fusion=True,
    gradient_accumulation_fusion=False,
    overlap_p2p_comm=bool(args.virtual_stages),
    batch_p2p_comm=not args.virtual_stages,
    **(experts if args.num_experts else {}),
)
make_spec = specs.get_gpt_layer_local_spec if args.spec == "local" else specs.get_gpt_layer_with_transformer_engine_spec
layer = make_spec(args.num_experts or None, args.grouped)


def build(stage: int | None) -> torch.nn.Module:
    """Returns a chunk of the model, on the device, in bf16."""
    where = {"ignore_virtual": False, "vp_stage": stage}
    model = GPTModel(
        config,
        layer,
        args.vocab_size,
        args.seq_length,
        pre_process=groups.is_pipeline_first_stage(**where),
        post_process=groups.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=stage,
    )
    model.model_type = ModelType.encoder_or_decoder
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return Float16Module(config, model.cuda(torch.cuda.current_device()))


wrapping = DistributedDataParallelConfig(
    grad_reduce_in_fp32=True,
    overlap_grad_reduce=args.overlap_grad_reduce,
    overlap_param_gather=args.overlap_param_gather,
    use_distributed_optimizer=args.use_distributed_optimizer,
    check_for_nan_in_grad=True,
)
stages = range(args.virtual_stages) if args.virtual_stages else [None]
chunks = [DistributedDataParallel(config, wrapping, build(stage), disable_bucketing=bool(stage)) for stage in stages]
for chunk in chunks:
    chunk.broadcast_params()
optimizer = get_megatron_optimizer(
    OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
        clip_grad=1.0,
    ),
    chunks,
)
config.finalize_model_grads_func = finalize_model_grads
config.grad_scale_func = optimizer.scale_loss
config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
if args.overlap_grad_reduce:
    starts = [chunk.start_grad_sync for chunk in chunks]
    config.grad_sync_func = starts if len(starts) > 1 else starts[0]
length = args.seq_length // args.context_parallel_size


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the sum of the losses, how many there are, and what is reported."""
    losses = output.view(-1).float()
    mask = mask.view(-1).float()
    loss = torch.sum(losses * mask)
    count = mask.sum().clone().detach().to(torch.int)
    return loss, count, {"lm loss": torch.cat([loss.clone().detach().view(1), count.view(1)])}


def forward_step(batches: Any, model: torch.nn.Module) -> Any:
    """Returns a chunk's output and the function of the loss."""
    tokens, labels, mask, positions = next(batches)
    return model(tokens, positions, None, labels=labels), partial(loss_of, mask)


def batches() -> Any:
    """Yields batches of random tokens, of which this rank has its part of the sequence."""
    size = args.micro_batch_size, length
    while True:
        tokens = torch.randint(args.vocab_size, (args.micro_batch_size, length + 1), device="cuda")
        positions = torch.arange(length, device="cuda").expand(size)
        mask = torch.ones(size, device="cuda")
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, positions


step = get_forward_backward_func()
count = args.global_batch_size // (args.micro_batch_size * groups.get_data_parallel_world_size())
for iteration in range(args.train_iters):
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reduced = step(
        forward_step_func=forward_step,
        data_iterator=[batches() for _ in chunks] if len(chunks) > 1 else batches(),
        model=chunks,
        num_microbatches=count,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.seq_length,
        forward_only=False,
    )
    succeeded, norm, _ = optimizer.step()
    if groups.is_pipeline_last_stage(ignore_virtual=True):
        print(f"iteration {iteration} norm {norm}", reduced[0]["lm loss"])
torch.distributed.destroy_process_group()
