"""YAML of the trainers that are configured by one: TRL's command line, axolotl and ms-swift.

Keys: TRL's ``SFTConfig`` of 1.16 with transformers 5.23, axolotl's schemas and Liger plugin of 0.19.0, ms-swift's
arguments of 4.6.0.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from memprof.emit.code.short_pieces import options_text
from memprof.emit.emission import Emitted, Request, Target, about, listed
from memprof.emit.targets.shared import Sorted, is_every_layer
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.allocator.policy import VARIABLE, Allocator
from memprof.policies.base import Policy
from memprof.policies.compile.policy import Compile
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.precision.policy import Precision
from memprof.policies.shard.policy import Shard
from memprof.policies.swap.policy import Swap

_IN_CODE = "no key for it; memprof emit --to pytorch writes code for it."
_OPTIMIZERS = {"fused": "adamw_torch_fused", "foreach": "adamw_torch", "8bit": "adamw_torch_8bit"}


class YamlTrainer(Target):
    """A trainer that reads its settings from YAML.

    Attributes:
        start: The command that trains with the file.
        batch_key: Key of the micro-batch size.
        optimizer_key: Key of the optimizer's name.
        pure_bf16: Settings for weights in bfloat16.
        chunked_loss: Settings with which the logits are never whole, and their note.
        offload: Value that moves activations, by destination; {} if the trainer moves none.
        offload_key: Key of that value; "" if it is an entry of ``gradient_checkpointing_kwargs``.
        offload_inputs: Value of that key that moves only what goes into recomputed layers.
        shard: Settings of FSDP2, without resharding; {} if they are not in this file.
    """

    start: ClassVar[str]
    batch_key: ClassVar[str] = "per_device_train_batch_size"
    optimizer_key: ClassVar[str] = "optim"
    pure_bf16: ClassVar[dict[str, Any]]
    chunked_loss: ClassVar[tuple[dict[str, Any], str]]
    offload: ClassVar[dict[str, Any]] = {}
    offload_key: ClassVar[str] = ""
    offload_inputs: ClassVar[str] = ""
    shard: ClassVar[dict[str, Any]] = {}

    def emit(self, request: Request) -> Emitted:
        """Emits the settings as YAML, to add to those of the job."""
        found = Sorted()
        policies = request.plan.policies
        for policy in policies:
            self._sort(found, policy, policies)
        if not found.expressed:
            return Emitted("", tuple(found.cannot), tuple(found.notes))
        self._set_batch(found, request)
        lines = [
            *about(request, self.title),
            "",
            f"Add these keys to your own file: {self.start}",
            *listed("Note:", tuple(found.notes)),
            *listed("Cannot express:", tuple(found.cannot)),
        ]
        comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
        body = "\n".join(f"{key}: {json.dumps(value)}" for key, value in found.arguments.items())  # JSON is YAML
        cannot, notes = tuple(found.cannot), tuple(found.notes)
        return Emitted(f"{comment}\n{body}\n", cannot, notes, found.expressed, found.arguments)

    def _set_batch(self, found: Sorted, request: Request) -> None:
        if request.batch:
            found.arguments[self.batch_key] = request.batch_of_a_part
        elif request.parts > 1:
            found.notes.append(f"{self.batch_key}: divide yours by {request.parts}, or pass --batch N to memprof emit.")

    def _sort(self, found: Sorted, policy: Policy, policies: tuple[Policy, ...]) -> None:
        match policy:
            case Precision(weights="fp32"):
                found.take({policy.dtype: True})
            case Precision():
                found.take(self.pure_bf16)
            case Accumulate():
                found.take({"gradient_accumulation_steps": policy.micro_batches})
            case ChunkedLoss():
                found.take(*self.chunked_loss)
            case Swap(what="activations") if policy.to in self.offload:
                self._sort_swap(found, policy, policies)
            case Shard():
                self._sort_shard(found, policy)
            case OptimizerPolicy():
                self._sort_optimizer(found, policy)
            case Compile() if policy.is_plain and policy.modules in ((".",), ("",)):
                found.take({"torch_compile": True})
            case Allocator():
                found.leave(policy, f"not a key of this file: start the job with {VARIABLE}={options_text(policy)}.")
            case _ if policy.name == "checkpoint" and is_every_layer(policies):
                kwargs = found.arguments.get("gradient_checkpointing_kwargs", {})
                found.take(
                    {
                        "gradient_checkpointing": True,
                        "gradient_checkpointing_kwargs": {"use_reentrant": False, **kwargs},
                    },
                    "checkpoint: recomputes every layer for which the model supports it; for a model with one list "
                    "of layers, these are the plan's.",
                )
            case _:
                found.leave(policy, _IN_CODE)

    def _sort_swap(self, found: Sorted, policy: Swap, policies: tuple[Policy, ...]) -> None:
        value = self.offload[policy.to]
        if self.offload_key and is_every_layer(policies) and policy.to == "host":
            found.take(
                {self.offload_key: self.offload_inputs},
                f"{policy.describe()}: moves the inputs of recomputed layers.",
            )
        elif self.offload_key:
            found.take({self.offload_key: value}, f"{policy.describe()}: moves the activations of all modules.")
        elif is_every_layer(policies):
            kwargs = {**found.arguments.get("gradient_checkpointing_kwargs", {}), "offload": value}
            found.take(
                {"gradient_checkpointing_kwargs": kwargs},
                f"{policy.describe()}: moves the inputs of recomputed layers.",
            )
        else:
            found.leave(policy, "the trainer moves only the inputs of recomputed layers, and the plan recomputes none.")

    def _sort_shard(self, found: Sorted, policy: Shard) -> None:
        start = f"shard: start with torchrun --nproc-per-node {policy.world_size}."
        if policy.stage == 0:
            found.take({}, start)
        elif policy.stage == 1 or not self.shard:
            found.leave(policy, "no key for it; memprof emit --to deepspeed writes a file that the trainer accepts.")
        else:
            reshards = policy.stage == 3 and policy.reshard_after_forward
            found.take({**self.shard, "fsdp_config": {"reshard_after_forward": reshards}}, start)

    def _sort_optimizer(self, found: Sorted, policy: OptimizerPolicy) -> None:
        wanted = policy.state or policy.loop
        if wanted in _OPTIMIZERS:
            found.take({self.optimizer_key: _OPTIMIZERS[wanted]}, f"optimizer {wanted}: the AdamW variant.")
        elif wanted:
            found.leave(policy, f"no key for {wanted}.")
        if policy.in_backward:
            found.leave(policy, "the trainer updates only after backward.")


class Trl(YamlTrainer):
    """TRL's command line, such as ``trl sft --config``."""

    name: ClassVar[str] = "trl"
    title: ClassVar[str] = "TRL"
    start: ClassVar[str] = "trl sft --config FILE"
    pure_bf16: ClassVar[dict[str, Any]] = {"dtype": "bfloat16", "bf16": False}
    chunked_loss: ClassVar[tuple[dict[str, Any], str]] = (
        {"loss_type": "chunked_nll"},
        (
            "loss: TRL chooses the number of chunks; TRL 1.16 does so by default and warns about the option. The "
            "alternative, use_liger_kernel: true, needs liger-kernel and a GPU."
        ),
    )
    offload: ClassVar[dict[str, Any]] = {"host": True}
    shard: ClassVar[dict[str, Any]] = {"fsdp": True}


class Axolotl(YamlTrainer):
    """axolotl's configuration file."""

    name: ClassVar[str] = "axolotl"
    title: ClassVar[str] = "axolotl"
    start: ClassVar[str] = "axolotl train FILE"
    batch_key: ClassVar[str] = "micro_batch_size"
    optimizer_key: ClassVar[str] = "optimizer"
    pure_bf16: ClassVar[dict[str, Any]] = {"bfloat16": True}
    chunked_loss: ClassVar[tuple[dict[str, Any], str]] = (
        {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True},
        (
            "loss: Liger's fused kernel never materializes the logits and chooses its own chunks. If the file "
            "already has a list of plugins, add this one to it."
        ),
    )
    offload: ClassVar[dict[str, Any]] = {"host": True, "disk": "disk"}
    offload_key: ClassVar[str] = "activation_offloading"
    offload_inputs: ClassVar[str] = "hidden_states"
    shard: ClassVar[dict[str, Any]] = {"fsdp_version": 2}


class MsSwift(YamlTrainer):
    """ms-swift's arguments, as a YAML file in their place."""

    name: ClassVar[str] = "ms-swift"
    title: ClassVar[str] = "ms-swift"
    start: ClassVar[str] = "swift sft FILE.yaml"
    pure_bf16: ClassVar[dict[str, Any]] = {"torch_dtype": "bfloat16"}
    chunked_loss: ClassVar[tuple[dict[str, Any], str]] = (
        {"use_liger_kernel": True},
        (
            "loss: Liger's fused kernel never materializes the logits and chooses its own chunks; it needs "
            "liger-kernel and a GPU."
        ),
    )
