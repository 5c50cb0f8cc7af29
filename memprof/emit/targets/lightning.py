"""Arguments of Lightning's Trainer, and model code for policies without an argument."""

from __future__ import annotations

from typing import ClassVar

from memprof.emit.code.pieces import Code, Function, module_text
from memprof.emit.code.short_pieces import divide_statements, shard_code
from memprof.emit.emission import Emitted, Request, Target, about, listed
from memprof.emit.targets.pytorch import prepare_of
from memprof.emit.targets.shared import Sorted, dictionary, goes_around_model
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.precision.policy import Precision
from memprof.policies.shard.policy import Shard

_PRECISIONS = {("bf16", "fp32"): "bf16-mixed", ("fp16", "fp32"): "16-mixed", ("bf16", "bf16"): "bf16-true"}
_STRATEGY = "ModelParallelStrategy(data_parallel_size={ranks}, tensor_parallel_size=1)"


class Lightning(Target):
    """Arguments of Lightning's Trainer."""

    name: ClassVar[str] = "lightning"
    title: ClassVar[str] = "Lightning's Trainer"

    def emit(self, request: Request) -> Emitted:
        """Emits ``trainer(**own)``, and ``prepare(model)`` and ``shard(model, mesh)`` where the plan needs them."""
        found = Sorted()
        for policy in request.plan.policies:
            _sort(found, policy)
        shards = [each for each in request.plan.policies if isinstance(each, Shard) and each.world_size > 1]
        full = next((each for each in shards if each.stage >= 2), None)
        self._say_batch(found, request)
        code = found.model_code()
        own = [Code(imports=("from lightning.pytorch import Trainer",))]
        values = {}
        body = []
        if full is not None:
            own.append(Code(imports=("from lightning.pytorch.strategies import ModelParallelStrategy",)))
            values["strategy"] = _STRATEGY.format(ranks=full.world_size)
        body += [f"plan = {dictionary(found.arguments, values)}", "return Trainer(**{**own, **plan})"]
        functions = [
            Function("trainer(**own)", "Returns a Trainer with your arguments and those of the plan.", tuple(body))
        ]
        if full is not None:
            units, _ = shard_code(full)
            own.append(Code(imports=_without_processes(units.imports), helpers=units.helpers))
            functions.append(
                Function("shard(model, mesh)", "Shards a model's parameters over the ranks.", divide_statements(full))
            )
        functions += [prepare_of(code, signature="prepare(model)")] if code.calls else []
        notes = (*found.notes, *code.notes)
        names = ", ".join(sorted(each.signature.partition("(")[0] for each in functions))
        lines = [*about(request, self.title), "", f"    from {request.module} import {names}"]
        if full is not None:
            lines += ["    # in configure_model() of your LightningModule, once it has its layers:"]
            lines += ['    shard(self.model, self.device_mesh["data_parallel"])']
        if code.calls:
            lines.append("    prepare(self.model)  # what training_step() calls, once it has its layers")
        lines += [
            "    trainer(max_epochs=1).fit(model, loader)",
            *listed("Note:", notes),
            *listed("Cannot express:", tuple(found.cannot)),
        ]
        text = module_text(lines, (*own, *code.codes), functions)
        return Emitted(text, tuple(found.cannot), notes, found.expressed + len(found.model), found.arguments)

    def _say_batch(self, found: Sorted, request: Request) -> None:
        """Notes the batch size required of the reader's DataLoader."""
        splits = any(isinstance(each, Shard) and each.batch == "split" for each in request.plan.policies)
        by = request.parts * (request.ranks if splits else 1)
        if by > 1:
            size = f"{request.batch_of_a_part}" if request.batch else f"the recorded one divided by {by}"
            found.notes.append(f"batch_size of your DataLoader: {size}.")


def _sort(found: Sorted, policy: Policy) -> None:
    """Adds one policy to the arguments, the model code or the unsupported parts."""
    match policy:
        case Precision():
            found.take(
                {"precision": _PRECISIONS[policy.dtype, policy.weights]},
                "precision: Lightning's covers training_step() including the loss, memprof's only the model.",
            )
        case Accumulate():
            found.take({"accumulate_grad_batches": policy.micro_batches})
        case Shard() if policy.world_size > 1:
            strategies = {0: "ddp", 1: "deepspeed_stage_1"}
            arguments: dict[str, object] = {"devices": policy.world_size}
            if policy.stage in strategies:
                arguments["strategy"] = strategies[policy.stage]
            found.take(arguments, "shard: stage 1 needs DeepSpeed installed." if policy.stage == 1 else "")
        case Shard():
            found.take({})
        case OptimizerPolicy():
            found.leave(
                policy,
                "configure_optimizers() of your LightningModule creates the optimizer; Trainer has no argument for it.",
            )
        case _ if goes_around_model(policy):
            found.model.append(policy)
        case _:
            found.leave(
                policy, "configure_optimizers() creates the optimizer; memprof emit --to pytorch writes code for it."
            )


def _without_processes(imports: tuple[str, ...]) -> tuple[str, ...]:
    """Removes what Lightning does itself: starting ranks and creating their mesh."""
    return tuple(each for each in imports if "torch.distributed as" not in each and "device_mesh" not in each)
