"""TrainingArguments of Hugging Face's transformers, and model code for policies without an argument."""

from __future__ import annotations

from typing import Any, ClassVar

from memprof.emit.code.pieces import Code, Function, module_text
from memprof.emit.emission import Emitted, Request, Target, about, listed
from memprof.emit.targets.pytorch import prepare_of
from memprof.emit.targets.shared import Sorted, dictionary, goes_around_model, is_every_layer
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.compile.policy import Compile
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.precision.policy import Precision
from memprof.policies.shard.policy import Shard
from memprof.policies.swap.policy import Swap

#: ``Trainer``'s own activation checkpointing, under the name it has in the installed version.
_RECOMPUTE = (
    "# Older versions of transformers call it gradient_checkpointing.\n"
    'has_new_name = hasattr(TrainingArguments, "activation_checkpointing")\n'
    'recompute = "activation_checkpointing" if has_new_name else "gradient_checkpointing"\n'
    'recomputing = {recompute: True, f"{recompute}_kwargs": {"use_reentrant": False%s}}'
)
_EVERY_LAYER = (
    "checkpoint: Trainer recomputes every layer for which the model supports it; for a model with one list of "
    "layers, these are the plan's."
)


class HuggingFace(Target):
    """Arguments of transformers' Trainer."""

    name: ClassVar[str] = "hf"
    title: ClassVar[str] = "Hugging Face TrainingArguments"

    def emit(self, request: Request) -> Emitted:
        """Emits ``training_arguments(**own)``, and ``prepare(model)`` where needed."""
        found = Sorted()
        policies = request.plan.policies
        recomputes = is_every_layer(policies)
        for policy in policies:
            _sort(found, policy, recomputes=recomputes, moves=recomputes and not _is_sharded(policies))
        self._set_batch(found, request)
        is_sharded = "fsdp" in found.arguments
        if recomputes and is_sharded:
            found.arguments["fsdp_config"]["activation_checkpointing"] = True
        code = found.model_code()
        notes = (*found.notes, *code.notes)
        lines = [*about(request, self.title), ""]
        names = ("prepare", "training_arguments") if code.calls else ("training_arguments",)
        lines += [f"    from {request.module} import {', '.join(names)}"]
        lines += ["    prepare(model)  # before Trainer takes the model"] if code.calls else []
        lines += [
            '    trainer = Trainer(model=model, args=training_arguments(output_dir="out", learning_rate=3e-4), ...)',
            *listed("Note:", notes),
            *listed("Cannot express:", tuple(found.cannot)),
        ]
        uses_own = recomputes and not is_sharded
        body = (
            *((_RECOMPUTE % (', "offload": True' if "offload" in found.switches else ""),) if uses_own else ()),
            f"plan = {dictionary(found.arguments)}",
            f"return TrainingArguments(**{{**own, **plan{', **recomputing' if uses_own else ''}}})",
        )
        functions = [Function("training_arguments(**own)", "Returns your arguments with those of the plan.", body)]
        functions += [prepare_of(code, signature="prepare(model)")] if code.calls else []
        own = Code(imports=("from transformers import TrainingArguments",))
        text = module_text(lines, (own, *code.codes), functions)
        recomputing: dict[str, Any] = {}
        if uses_own:
            recomputing["activation_checkpointing"] = True
            if "offload" in found.switches:
                recomputing["activation_checkpointing_kwargs"] = {"offload": True}
        arguments = {**found.arguments, **recomputing}
        return Emitted(text, tuple(found.cannot), notes, found.expressed + len(found.model), arguments)

    def _set_batch(self, found: Sorted, request: Request) -> None:
        splits = any(isinstance(each, Shard) and each.batch == "split" for each in request.plan.policies)
        if request.parts == 1 and not splits:
            return
        if request.batch:
            found.arguments["per_device_train_batch_size"] = request.batch_of_a_part
            return
        by = request.parts * (request.ranks if splits else 1)
        found.notes.append(f"per_device_train_batch_size: divide yours by {by}, or pass --batch N to memprof emit.")


def _is_sharded(policies: tuple[Policy, ...]) -> bool:
    return any(isinstance(each, Shard) and each.world_size > 1 and each.stage >= 2 for each in policies)


def _sort(found: Sorted, policy: Policy, *, recomputes: bool, moves: bool) -> None:
    """Adds one policy to the arguments, the model code or the unsupported parts.

    Args:
        found: Where it is added.
        policy: The policy.
        recomputes: Whether Trainer recomputes the plan's layers itself.
        moves: Whether it can also move what goes into them to host memory.
    """
    match policy:
        case Swap(what="activations", to="host") if moves:
            found.switches.add("offload")
            found.take({}, f"{policy.describe()}: moves the inputs of recomputed layers, by transformers 5's offload.")
        case ChunkedLoss():
            found.model.append(policy)
            found.notes.append(
                "loss: on a GPU, use_liger_kernel=True (liger-kernel) never materializes the logits and needs no "
                "memprof; TRL's SFTTrainer never does from 1.16 on, before with loss_type='chunked_nll'."
            )
        case Precision(weights="fp32"):
            found.take({policy.dtype: True})
        case Precision():
            found.leave(policy, "load the model with dtype=torch.bfloat16; Trainer has no argument for it.")
        case Accumulate():
            found.take({"gradient_accumulation_steps": policy.micro_batches})
        case Shard() if policy.world_size > 1:
            _sort_shard(found, policy)
        case Shard():
            found.take({})
        case OptimizerPolicy():
            _sort_optimizer(found, policy)
        case Compile() if policy.is_plain and policy.modules in ((".",), ("",)):
            found.take({"torch_compile": True})
        case _ if policy.name == "checkpoint" and recomputes:
            found.take({}, _EVERY_LAYER)
        case _ if goes_around_model(policy):
            found.model.append(policy)
        case _:
            found.leave(policy, "Trainer creates the optimizer itself and has no argument for this.")


def _sort_shard(found: Sorted, policy: Shard) -> None:
    start = f"shard: start the script with torchrun --nproc-per-node {policy.world_size}."
    if policy.stage == 0:
        found.take({}, start)
    elif policy.stage == 1:
        found.leave(policy, "Trainer supports it only through DeepSpeed; memprof emit --to deepspeed writes that file.")
    else:
        reshards = policy.stage == 3 and policy.reshard_after_forward
        units = "; units are the model's own layer classes" if policy.units else ""
        found.take(
            {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": reshards}}, f"{start[:-1]}{units}."
        )


def _sort_optimizer(found: Sorted, policy: OptimizerPolicy) -> None:
    named = {"fused": "adamw_torch_fused", "foreach": "adamw_torch", "8bit": "adamw_torch_8bit"}
    wanted = policy.state or policy.loop
    if wanted in named:
        more = " It is torch's default on a GPU; on a CPU torch uses a loop." if wanted == "foreach" else ""
        more = " It needs torchao." if wanted == "8bit" else more
        found.take(
            {"optim": named[wanted]}, f"optimizer {wanted}: the AdamW variant; AdamW is Trainer's default.{more}"
        )
    elif wanted:
        found.leave(policy, f"Trainer has no argument for {wanted}.")
    if policy.in_backward:
        found.leave(policy, "Trainer updates only after backward.")
