"""Stage 1: each rank updates its part of every parameter, with its part of the optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memprof.errors import PolicyError
from memprof.policies.runtime.job import PerOptimizer
from memprof.policies.shard.division import fill_buckets
from memprof.policies.shard.process_group import gather

if TYPE_CHECKING:
    from memprof.policies.runtime.job import Job
    from memprof.policies.shard.policy import Shard

#: torch optimizers that update each element independently, so that parts can be updated separately.
_ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def check_elementwise(optimizers: list[torch.optim.Optimizer]) -> None:
    """Rejects optimizers that need whole parameters.

    Raises:
        PolicyError: Names the first such optimizer.
    """
    for optimizer in optimizers:
        if type(optimizer) not in _ELEMENTWISE:
            raise PolicyError(
                f"shard in stage 1 updates parts of parameters, and {type(optimizer).__name__} is not known to update "
                "each element independently; use stage 3, or one of torch's Adam, AdamW, SGD, RMSprop, Adagrad."
            )


@dataclass(eq=False)
class _Part:
    """This rank's part of a parameter, along the first dimension.

    Attributes:
        whole: The parameter.
        part: A view of it, which the optimizer updates instead.
        start: First row.
        rows: Rows of each rank's part; the last ranks may have fewer, or none.
    """

    whole: torch.nn.Parameter
    part: torch.nn.Parameter
    start: int
    rows: int

    @property
    def row_elements(self) -> int:
        """Elements per row."""
        return self.whole.numel() // max(len(self.whole) if self.whole.dim() else 1, 1)


class DividedUpdates:
    """Presents whole parameters to the optimizer, but updates only this rank's parts of them.

    Outside the update nothing changes: gradients are zeroed, clipped and scheduled as before. After it, the ranks
    exchange the parts they updated, some parameters at a time.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models"; parts are
    rows, as in fully_shard, whereas ZeroRedundancyOptimizer assigns whole parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, policy: Shard, rank: int) -> None:
        """Creates the parts; sharding starts with `install`."""
        self.optimizer = optimizer
        self._ranks, self._rank, self._bucket_mib = policy.world_size, rank, policy.bucket_mib
        self._parts: dict[int, _Part] = {}
        self._whole: list[list[Any]] = []
        self._added: list[dict[str, Any]] = []

    def install(self, job: Job) -> None:
        """Starts sharding; does nothing where the job of another model has started it for this optimizer."""
        if _in_force.get(self.optimizer) is not None:
            return
        _in_force.keep(job, self)
        # A user-defined step that overrides torch's runs the same hooks: torch wraps it.
        for handle in (
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ):
            job.on_undo(handle.remove)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Replaces the parameters by the parts."""
        if self._whole:  # the previous update failed
            self._put_whole()
        self._put_parts()
        # A closure zeroes and computes gradients of the whole parameters.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None

        def with_whole() -> Any:
            self._put_whole()
            try:
                return closure()
            finally:
                self._put_parts()

        return (
            ((args[0], with_whole, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": with_whole})
        )

    def _put_parts(self) -> None:
        groups = self.optimizer.param_groups
        self._whole = [group["params"] for group in groups]
        for group, whole in zip(groups, self._whole, strict=True):
            parts = []
            for parameter in whole:
                own = self._part_of(parameter)
                gradient = parameter.grad
                own.part.grad = None if gradient is None else _rows(gradient, own.start, len(own.part))
                if len(own.part):
                    parts.append(own.part)
            group["params"] = parts

    def _put_whole(self) -> None:
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = whole
            for parameter in whole:
                self._parts[id(parameter)].part.grad = None
        self._whole = []

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Restores the parameters, and gathers the other ranks' updates."""
        self._put_whole()
        updated = [
            self._parts[id(parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        kinds = dict.fromkeys((own.whole.dtype, own.whole.device) for own in updated)
        for kind in kinds:
            alike = [own for own in updated if (own.whole.dtype, own.whole.device) == kind]
            sizes = [own.whole.nbytes for own in alike]
            for members in fill_buckets(range(len(alike)), sizes, self._bucket_mib):
                self._exchange([alike[member] for member in members])

    def _part_of(self, parameter: torch.nn.Parameter) -> _Part:
        known = self._parts.get(id(parameter))
        if known is None:
            length = len(parameter) if parameter.dim() else 1
            rows = -(-length // self._ranks)
            start = min(self._rank * rows, length)
            part = torch.nn.Parameter(_rows(parameter.detach(), start, min(rows, length - start)))
            known = self._parts[id(parameter)] = _Part(parameter, part, start, rows)
        elif known.part.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
            # The script has replaced the parameter's memory: .to(), or another state.
            known.part.data = _rows(parameter.detach(), known.start, len(known.part))
        return known

    @torch.no_grad()
    def _exchange(self, parts: list[_Part]) -> None:
        """Gathers the parts of all ranks, through one buffer with equal space per rank."""
        sizes = [own.rows * own.row_elements for own in parts]
        first = parts[0].whole
        whole = torch.empty((self._ranks, sum(sizes)), dtype=first.dtype, device=first.device)
        mine = whole[self._rank]
        for own, place in zip(parts, torch.split(mine, sizes), strict=True):
            place[: own.part.numel()].copy_(own.part.reshape(-1))
        gather(whole.view(-1), mine)
        for own, place in zip(parts, torch.split(whole, sizes, dim=1), strict=True):
            for rank, received in enumerate(place):
                rows = _rows(own.whole, rank * own.rows, own.rows)
                rows.copy_(received[: rows.numel()].view(rows.shape))


#: The divided updates in force.
_in_force: PerOptimizer[DividedUpdates] = PerOptimizer()


def _rows(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    return (tensor if tensor.dim() else tensor.reshape(1))[start : start + count]
