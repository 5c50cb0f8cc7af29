"""Trains one of four models as it is, or under the plan of one of several planners.

Prints the microseconds of each step, the last loss and the static bytes as JSON, in its last line.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from pathlib import Path

import torch
from rival_models import MODELS
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model, inputs, targets):
    outputs = model(inputs)
    return F.cross_entropy(outputs.flatten(0, 1) if outputs.dim() == 3 else outputs, targets)


def static_bytes(model, optimizer) -> int:
    """Counts parameters, buffers and what the optimizer keeps of them."""
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *state))


def checkpoint_modules(model, decisions: dict[str, list[int] | None]) -> None:
    """Checkpoints modules: as a whole, or but for those of their operators, in order, that are marked 1."""
    for name, kept in decisions.items():
        module = model.get_submodule(name)
        more = {} if kept is None else {"context_fn": functools.partial(_contexts, kept)}
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, **more)


def _contexts(kept: list[int]):
    # As torch's estimator numbers them: without the operators that it skips.
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    numbers = {False: itertools.count(), True: itertools.count()}

    def policy(context, op, *args, **kwargs):
        if op in OPS_TO_ALWAYS_SKIP:
            return CheckpointPolicy.PREFER_RECOMPUTE
        is_kept = kept[next(numbers[context.is_recompute])]
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--how", choices=("plain", "layers", "planned", "memprof", "inductor"), default="plain")
    parser.add_argument("--plan", type=Path, help="what --how planned or memprof applies")
    parser.add_argument("--activation-budget", type=float, default=1.0, help="of the compiler")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rivalled = MODELS[args.model]
    model, batch = rivalled.make(), rivalled.make_batch()
    optimizer = make_optimizer(model)
    loss_function = loss_of
    if args.how == "layers":
        checkpoint_modules(model, dict.fromkeys(rivalled.blocks(model)))
    elif args.how == "planned":
        checkpoint_modules(model, json.loads(args.plan.read_text(encoding="utf-8"))["checkpoint"])
    elif args.how == "memprof":
        import memprof

        memprof.apply(args.plan, model, optimizer)
    elif args.how == "inductor":
        from torch._functorch import config

        config.activation_memory_budget = args.activation_budget
        loss_function = torch.compile(loss_of)
    steps_us = []
    for _ in range(args.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_function(model, *batch)
        loss.backward()
        optimizer.step()
        value = loss.item()
        del loss
        steps_us.append((time.perf_counter() - start) * 1e6)
    print(json.dumps({"steps_us": steps_us, "loss": value, "static_bytes": static_bytes(model, optimizer)}))


if __name__ == "__main__":
    main()
