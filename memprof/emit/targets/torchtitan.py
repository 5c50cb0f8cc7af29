"""torchtitan's configuration, which since 0.3 is Python: dataclasses returned by a config registry function.

Names and values: torchtitan 0.3.0, torchtitan/config/configs.py and torchtitan/distributed/activation_checkpoint.py.
"""

from __future__ import annotations

from typing import ClassVar

from memprof.emit.code.pieces import Code, Function, module_text
from memprof.emit.code.short_pieces import allocator_code
from memprof.emit.emission import Emitted, Request, Target, about, listed
from memprof.emit.targets.shared import Sorted, is_every_layer
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.allocator.policy import Allocator
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compile.policy import Compile
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.precision.policy import Precision
from memprof.policies.shard.policy import Shard
from memprof.policies.swap.policy import Swap

_RECOMPUTING = "torchtitan.distributed.activation_checkpoint"
_LOOPS = {"loop": "for-loop", "foreach": "foreach", "fused": "fused"}
_OFFLOADED = {"parameters", "optimizer"}


class TorchTitan(Target):
    """torchtitan's Trainer.Config."""

    name: ClassVar[str] = "torchtitan"
    title: ClassVar[str] = "torchtitan 0.3"

    def emit(self, request: Request) -> Emitted:
        """Emits ``under_plan(config)``, for a config registry function."""
        found = _Statements()
        for policy in request.plan.policies:
            found.sort(policy, request)
        lines = [
            *about(request, self.title),
            "",
            "In the function of your config registry:",
            "",
            f"    from {request.module} import under_plan",
            "    return under_plan(Trainer.Config(...))",
            *listed("Note:", tuple(found.sorted.notes)),
            *listed("Cannot express:", tuple(found.sorted.cannot)),
        ]
        body = (*found.statements, "return config")
        function = Function("under_plan(config)", "Returns a Trainer.Config with what the plan sets.", body)
        text = module_text(lines, (Code(imports=tuple(found.imports)), *found.codes), [function])
        return Emitted(text, tuple(found.sorted.cannot), tuple(found.sorted.notes), found.sorted.expressed)


class _Statements:
    """Collects statements about ``config``."""

    def __init__(self) -> None:
        self.sorted = Sorted()
        self.imports: list[str] = []
        self.codes: list[Code] = []
        self.statements: list[str] = []

    def sort(self, policy: Policy, request: Request) -> None:
        """Adds one policy to the statements, the notes or the unsupported parts."""
        match policy:
            case Shard():
                self._shard(policy)
            case Precision(weights="bf16"):
                self._set('config.training.dtype = "bfloat16"')
            case Precision(dtype="bf16"):
                self._set('config.training.dtype = "float32"', 'config.training.mixed_precision_param = "bfloat16"')
            case Accumulate():
                self._set(
                    f"config.training.global_batch_size = config.training.local_batch_size * {request.ranks}",
                    f"config.training.local_batch_size //= {policy.micro_batches}",
                )
            case Checkpoint() if is_every_layer(request.plan.policies) and policy.modules == ("layers.*",):
                self.imports.append(f"from {_RECOMPUTING} import FullAC")
                self._set("config.activation_checkpoint = FullAC.Config()")
            case Checkpoint():
                why = (
                    "SelectiveAC keeps every second matrix product"
                    if policy.keep
                    else "torchtitan recomputes all layers"
                )
                self.sorted.leave(policy, f"{why}; modules cannot be selected by name.")
            case Compile() if policy.fusion_gb < 0 and policy.modules in ((".",), ("",), ("layers.*",)):
                self._compile(policy)
            case OptimizerPolicy():
                self._optimizer(policy)
            case ChunkedLoss():
                self._loss(policy)
            case Swap() if policy.what in _OFFLOADED and policy.to == "host":
                self._offload(policy, request)
            case Allocator():
                code = allocator_code(policy)
                self.codes.append(code)
                self.sorted.take({}, code.notes[0])
            case _:
                self.sorted.leave(policy, "Trainer.Config has no field for it.")

    def _set(self, *statements: str, note: str = "") -> None:
        self.statements += statements
        self.sorted.take({}, note)

    def _shard(self, policy: Shard) -> None:
        ranks = policy.world_size
        if policy.stage == 1:
            self.sorted.leave(policy, "torchtitan shards parameters too (stages 2 and 3), or nothing (stage 0).")
            return
        degrees = (ranks, 1) if policy.stage == 0 else (1, ranks)
        statements = [
            f"config.parallelism.data_parallel_replicate_degree = {degrees[0]}",
            f"config.parallelism.data_parallel_shard_degree = {degrees[1]}",
        ]
        if policy.stage >= 2:
            reshards = policy.stage == 3 and policy.reshard_after_forward
            how = "default" if reshards else "never"
            statements.append(f'config.parallelism.fsdp_reshard_after_forward = "{how}"')
        units = " Units are torchtitan's: the layers, embeddings and the head." if policy.stage >= 2 else ""
        if policy.batch == "split":
            statements.append(f"config.training.local_batch_size //= {ranks}")
        self._set(*statements, note=f"shard: start with torchrun --nproc-per-node {ranks}.{units}")

    def _compile(self, policy: Compile) -> None:
        statements = ["config.compile.enable = True"]
        if policy.activation_budget < 1:
            self.imports.append(f"from {_RECOMPUTING} import MemoryBudgetAC")
            budget = f"MemoryBudgetAC.Config(memory_budget={policy.activation_budget!r})"
            statements.append(f"config.activation_checkpoint = {budget}")
        self._set(*statements, note="compile: torchtitan compiles every layer, and the loss.")

    def _optimizer(self, policy: OptimizerPolicy) -> None:
        if policy.loop:
            self._set(f'config.optimizer.implementation = "{_LOOPS[policy.loop]}"')
        words = ["in-backward"] if policy.in_backward else []
        words += [policy.state] if policy.state else []
        if words:
            self.sorted.leave(policy, f"Trainer.Config has no field for {', '.join(words)}.")

    def _loss(self, policy: ChunkedLoss) -> None:
        self.imports.append("from torchtitan.components.loss import ChunkedLossWrapper")
        wrapped = f"ChunkedLossWrapper.Config(num_chunks={policy.chunks}, loss_fn=config.loss)"
        note = "loss: chunked along the sequence; the head's logits are never materialized either."
        self._set(
            "if isinstance(config.loss, ChunkedLossWrapper.Config):",
            f"    config.loss.num_chunks = {policy.chunks}",
            "else:",
            f"    config.loss = {wrapped}",
            note=note,
        )

    def _offload(self, policy: Swap, request: Request) -> None:
        """Sets the one option that offloads parameters, gradients and optimizer state together."""
        moved = {each.what for each in request.plan.policies if isinstance(each, Swap) and each.to == "host"}
        if not moved >= _OFFLOADED:
            self.sorted.leave(
                policy, "torchtitan moves parameters, gradients and optimizer state together or not at all."
            )
            return
        statement = "config.training.enable_cpu_offload = True"
        self._set(
            *(() if statement in self.statements else (statement,)),
            note=f"{policy.describe()}: gradients move too, and the update runs on the CPU; it needs FSDP.",
        )
