"""Trains a GPT of four layers as it is, or under the plan of one of several planners.

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
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 5000, 128, 256, 4, 4, 8


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids):
        return self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A chain of modules, so that planners of chains can take it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_batch():
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def static_bytes(model, optimizer) -> int:
    """Counts parameters and what the optimizer keeps of them; at the peak there are no gradients yet."""
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in (*model.parameters(), *state))


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
    parser.add_argument("--how", choices=("plain", "layers", "planned", "memprof", "inductor"), default="plain")
    parser.add_argument("--plan", type=Path, help="what --how planned or memprof applies")
    parser.add_argument("--activation-budget", type=float, default=1.0, help="of the compiler")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = GPT(), make_batch()
    optimizer = make_optimizer(model)
    loss_function = loss_of
    if args.how == "layers":
        checkpoint_modules(model, {f"layers.{number}": None for number in range(LAYERS)})
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
