"""Runs another planner on a model of rivals.py, and writes the modules to checkpoint as JSON.

The result names modules, each with None (all of it) or a list of 1 for each operator that is kept, else 0.
"refused" is the reason if a planner is not installed or finds nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rival_models import MODELS, Chain, Rivalled
from rivals import loss_of, make_optimizer, static_bytes
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

Answer = dict[str, Any]
REPEATS = 3


class Training(nn.Module):
    """A model and its loss as one module: torch's planner sees memory at the ends of modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        return loss_of(self.model, inputs, targets)


def plan_autosac(rivalled: Rivalled, budget_bytes: int) -> Answer:
    """Asks torch.distributed._tools for the modules and the operators in them."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

    tracker, runtimes, estimator, clock = MemTracker(), RuntimeEstimator(), SACEstimator(), Clock()
    with FakeTensorMode():
        model, batch = Training(rivalled.make()), rivalled.make_batch()
        optimizer = make_optimizer(model)
        tracker.track_external(model, optimizer)
        with tracker:
            for number in range(2):  # in the second step the optimizer has its state
                model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 0:
                    tracker.reset_mod_stats()
        optimizer_bytes = static_bytes(model, optimizer) - static_bytes(model, torch.optim.SGD(model.parameters()))
        # Both of its own estimators ask CUDA; the clock is ours.
        runtimes("operator-level-benchmark")._estimate = clock
        with runtimes:
            model(*batch).backward()
        estimator._estimate_runtime = clock
        with estimator:
            model(*batch)
    graph = parse_module_info(aggregate_stats(model, tracker, runtimes, estimator, torch.device("cpu")))
    # It counts parameters, gradients and activations, no state of the optimizer.
    shares, _, peak = sac_milp(graph, (budget_bytes - optimizer_bytes) / 2**30)
    if peak < 0:
        return {"refused": "its MILP finds no solution within the budget"}
    decisions = {}
    for name, discarded in shares.items():
        kept = get_optimal_checkpointing_policy_per_module(estimator.sac_mod_stats[name], 1 - discarded)
        decisions[name.removeprefix("Training.model").removeprefix(".")] = kept
    note = ", ".join(f"{100 * share:.0f} % of {name.removeprefix('Training.model.')}" for name, share in shares.items())
    promised = (peak + optimizer_bytes) / budget_bytes
    return {"checkpoint": decisions, "note": f"discards {note}; promised {promised:.0%} of the budget"}


class Clock:
    """Runs an operator on real data and takes its time, in milliseconds: what torch's estimators do on CUDA."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, float]:
        kwargs = kwargs or {}
        key = repr((op, tree_map(_described, (args, kwargs))))
        if key not in self._known:
            with no_dispatch():
                real_args, real_kwargs = tree_map(_real, (args, kwargs))
                self._known[key] = 0.0 if op.is_view else _milliseconds(lambda: op(*real_args, **real_kwargs))
        return op(*args, **kwargs), self._known[key]


def _described(value: object) -> object:
    return (value.dtype, tuple(value.shape), value.stride()) if torch.is_tensor(value) else value


def _real(value: object) -> object:
    if not torch.is_tensor(value):
        return value
    made = torch.rand if value.is_floating_point() else torch.zeros
    real = made(value.shape, dtype=value.dtype)
    return real.as_strided(value.shape, value.stride()) if real.numel() >= _reach(value) else real


def _reach(value: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


def _milliseconds(call: Callable[[], object]) -> float:
    call()
    start = time.perf_counter()
    for _ in range(REPEATS):
        call()
    return (time.perf_counter() - start) / REPEATS * 1e3


def plan_ckptplan(rivalled: Rivalled, budget_bytes: int) -> Answer:
    """Asks the dynamic programming of ckptplan for the blocks of the chain."""
    import ckptplan

    model, (inputs, targets) = rivalled.make(), rivalled.make_batch()
    if not isinstance(model, Chain):
        return {"refused": "it plans chains of modules only"}
    optimizer = make_optimizer(model)
    names = model.links()
    blocks = ckptplan.declare_blocks(model, [(name, model.get_submodule(name)) for name in names])
    profiles = ckptplan.profile_blocks(blocks, (inputs,), device="cpu", dtype=torch.float32)
    x, measured = inputs, []
    for name, profile in zip(names, profiles, strict=True):
        output, kept = kept_bytes(model.get_submodule(name), x)
        # Its profiler takes the growth of CUDA's counter, less the block's floating-point input.
        kept -= x.nbytes if x.is_floating_point() else 0
        measured.append(
            dataclasses.replace(
                profile,
                timing_only=False,
                activation_bytes_estimate=max(0, kept),
                activation_bytes_method="isolated_forward_delta",
            )
        )
        x = output.detach()
    loss_of(model, inputs, targets).backward()
    optimizer.step()
    plan = ckptplan.plan_checkpoints(
        measured,
        blocks,
        target_kind="activation_budget_bytes",
        target_value=budget_bytes - static_bytes(model, optimizer),
        planner="dynamic_programming",
    )
    chosen = [decision.block_id for decision in plan.decisions if decision.checkpointed]
    promised = plan.predicted_activation_bytes_after / plan.target_value
    note = f"checkpoints {', '.join(chosen) or 'nothing'}; promised {promised:.0%} of the activations asked"
    return {"checkpoint": dict.fromkeys(chosen), "note": note}


def kept_bytes(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Runs a module; returns its output and the bytes that are alive because of it."""
    storages: dict[int, int] = {}
    given = {tensor.untyped_storage().data_ptr() for tensor in (x, *module.parameters())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = x.detach().requires_grad_(x.is_floating_point())
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(x)
    pack(output)
    return output, sum(storages.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--planner", choices=("autosac", "ckptplan"), required=True)
    parser.add_argument("--budget", type=int, required=True, help="bytes, static ones included")
    parser.add_argument("--write", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        answer = {"autosac": plan_autosac, "ckptplan": plan_ckptplan}[args.planner](MODELS[args.model], args.budget)
    except ImportError as error:
        answer = {"refused": str(error)}
    args.write.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
