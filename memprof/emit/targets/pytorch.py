"""PyTorch code: one file that depends only on torch, on one device or over ranks with fully_shard (FSDP2)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from memprof.emit.code.model_code import PlanCode, plan_code
from memprof.emit.code.pieces import Function, module_text
from memprof.emit.code.short_pieces import shard_code
from memprof.emit.emission import Emitted, Request, Target, about, listed
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.precision.policy import Precision
from memprof.policies.shard.policy import Shard

_SCALER = "return torch.amp.GradScaler(next(model.parameters()).device.type, init_scale=2.0**12)"
_DATA = {
    "keep": "shard: give each rank batches of its own, with DistributedSampler in your DataLoader.",
    "split": "shard: give each of the {ranks} ranks its part of every batch.",
}
_NO_MEANS = (
    "the plan shards nothing that fully_shard supports; memprof emit --to pytorch writes the rest of it, --to "
    "deepspeed stages 0 and 1."
)


class PyTorch(Target):
    """Plain PyTorch code."""

    name: ClassVar[str] = "pytorch"
    title: ClassVar[str] = "PyTorch"

    def emit(self, request: Request) -> Emitted:
        """Emits ``prepare(model, optimizer)`` and the loop that goes with it."""
        plan = request.plan
        policies, refused = without_early_steps([each for each in plan.policies if not isinstance(each, Shard)])
        cannot = refused + tuple(
            f"{each.describe()}: this code is for one process; memprof emit --to fsdp2 writes stages 2 and 3."
            for each in plan.policies
            if isinstance(each, Shard) and each.world_size > 1
        )
        alone = [each for each in plan.policies if isinstance(each, Shard) and each.world_size == 1]
        code = plan_code(policies)
        lines = [
            *about(request, self.title),
            "",
            "Once the model is on its device and the optimizer exists, before the first step:",
            "",
            f"    from {request.module} import {names_of(code)}",
            f"    {'scaler = ' if code.has_scaler else ''}prepare(model, optimizer)",
            *loop_of(code),
            *listed("Note:", code.notes),
            *listed("Cannot express:", cannot),
        ]
        text = module_text(lines, code.codes, [prepare_of(code)])
        return Emitted(text, cannot, code.notes, len(policies) + len(alone))


def without_early_steps(policies: list[Policy]) -> tuple[list[Policy], tuple[str, ...]]:
    """Removes in-backward from policies that scale or accumulate gradients, with a note.

    memprof stops such a job; plain code would continue with wrong gradients.
    """
    scales = any(isinstance(each, Precision) and each.dtype == "fp16" for each in policies)
    adds_up = any(isinstance(each, Accumulate) for each in policies)
    if not (scales or adds_up):
        return policies, ()
    kept: list[Policy] = []
    refused = []
    for policy in policies:
        if isinstance(policy, OptimizerPolicy) and policy.in_backward:
            what = "accumulated" if adds_up else "scaled"
            refused.append(f"optimizer in-backward: gradients are {what} in this plan, and would be used too early.")
            if policy.loop or policy.state:
                kept.append(dataclasses.replace(policy, in_backward=False))
        else:
            kept.append(policy)
    return kept, tuple(refused)


def names_of(code: PlanCode) -> str:
    """Returns the names to import from the generated module."""
    return ", ".join(("micro_batches", "prepare") if code.parts > 1 else ("prepare",))


def loop_of(code: PlanCode) -> list[str]:
    """Returns the lines that show the loop."""
    return ["", INTRODUCTION, "", *loop_lines(parts=code.parts, has_scaler=code.has_scaler)]


def prepare_of(code: PlanCode, *, signature: str = "prepare(model, optimizer)") -> Function:
    """Returns the function that applies a plan's code."""
    body = (*code.calls, _SCALER) if code.has_scaler else code.calls
    if code.has_scaler:
        docstring = "Applies the plan to a model; returns the gradient scaler for the loop."
    elif "optimizer" in signature:
        docstring = "Applies the plan to a model and its optimizer."
    else:
        docstring = "Applies the part of the plan that no argument covers to a model."
    return Function(signature, docstring, body or ("return None  # everything is in the loop",))


#: Heading of the loop; tests find it by this line.
INTRODUCTION = "The loop, with loss_of(model, batch) for your forward and loss:"


def loop_lines(*, parts: int, has_scaler: bool) -> list[str]:
    """Returns the lines of the loop, indented by 4."""
    lines = ["for batch in loader:", "    optimizer.zero_grad()"]
    loss, backward, indent = "loss", "backward()", "    "
    if parts > 1:
        lines.append("    for part, share in micro_batches(batch):")
        indent, backward = "        ", "backward(torch.full_like(loss, share))"
    if has_scaler:
        loss = "scaler.scale(loss)"
    lines.append(f"{indent}loss = loss_of(model, {'part' if parts > 1 else 'batch'})")
    lines.append(f"{indent}{loss}.{backward}")
    lines += ["    scaler.step(optimizer)", "    scaler.update()"] if has_scaler else ["    optimizer.step()"]
    return [f"    {line}" for line in lines]


class Fsdp2(Target):
    """PyTorch code for several ranks."""

    name: ClassVar[str] = "fsdp2"
    title: ClassVar[str] = "PyTorch FSDP2"

    def emit(self, request: Request) -> Emitted:
        """Emits ``shard(model)``, ``prepare(model, optimizer)`` and the loop that goes with them."""
        policies = request.plan.policies
        shards = [each for each in policies if isinstance(each, Shard)]
        divides = next((each for each in shards if each.stage >= 2 and each.world_size > 1), None)
        if divides is None:
            below = (f"{each.describe()}: fully_shard shards parameters too (stages 2 and 3)." for each in shards)
            return Emitted("", (*below, _NO_MEANS))
        others = [each for each in policies if not isinstance(each, Shard)]
        cannot = tuple(sentence for each in others if (sentence := _refusal(each)))
        kept = [each for each in others if not _refusal(each)]
        units, body = shard_code(divides)
        code = plan_code(kept)
        notes = (
            _DATA[divides.batch].format(ranks=divides.world_size),
            "shard: on a GPU, choose each rank's device with torch.cuda.set_device(LOCAL_RANK) before all else.",
            *code.notes,
        )
        lines = [
            *about(request, self.title),
            "",
            f"Under torchrun --nproc-per-node {divides.world_size}, once the model is on its device:",
            "",
            f"    from {request.module} import {names_of(code)}, shard",
            "    shard(model)",
            "    optimizer = ...  # yours, of model.parameters(): created after shard(), which replaces them",
            f"    {'scaler = ' if code.has_scaler else ''}prepare(model, optimizer)",
            *loop_of(code),
            *listed("Note:", notes),
            *listed("Cannot express:", cannot),
        ]
        divide = Function("shard(model)", "Shards a model's parameters over the ranks of torchrun.", body)
        text = module_text(lines, (units, *code.codes), [divide, prepare_of(code)])
        return Emitted(text, cannot, notes, 1 + len(kept))


def _refusal(policy: Policy) -> str:
    """Explains why a policy is incompatible with sharded parameters, "" where it is compatible."""
    if not policy.excludes_sharding:
        return ""
    return f"{policy.describe()}: not possible with sharded parameters."
