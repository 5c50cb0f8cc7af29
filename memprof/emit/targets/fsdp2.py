"""PyTorch code that shards a job over ranks with fully_shard (FSDP2), with the rest of the plan."""

from __future__ import annotations

from typing import ClassVar

from memprof.emit.code.model_code import plan_code
from memprof.emit.code.pieces import Function, module_text
from memprof.emit.code.shard import shard_code
from memprof.emit.emission import Emitted, Request, Target
from memprof.emit.targets.pytorch import loop_of, names_of, prepare_of
from memprof.emit.words import about, listed
from memprof.policies.base import Policy
from memprof.policies.shard.policy import Shard

_DATA = {
    "keep": "shard: give each rank batches of its own, with DistributedSampler in your DataLoader.",
    "split": "shard: give each of the {ranks} ranks its part of every batch.",
}
_NO_MEANS = (
    "The plan shards nothing that fully_shard supports; memprof emit --to pytorch writes the rest of it, --to "
    "deepspeed stages 0 and 1."
)


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
            return Emitted("", (*(_of_stage(each) for each in shards), _NO_MEANS))
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


def _of_stage(policy: Shard) -> str:
    return f"{policy.describe()}: fully_shard shards parameters too (stages 2 and 3)."


def _refusal(policy: Policy) -> str:
    """Explains why a policy is incompatible with sharded parameters, "" where it is compatible."""
    if not policy.excludes_sharding:
        return ""
    return f"{policy.describe()}: not possible with sharded parameters."
