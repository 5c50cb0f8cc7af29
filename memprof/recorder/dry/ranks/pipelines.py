"""Follows the stages of torch's pipelines, to find ranks that differ only in how many micro-batches they store.

Source: torch.distributed.pipelining. Before its first micro-batch a stage runs its module once, forward and backward,
to learn the sizes that it exchanges, unless the job has given them. It runs one micro-batch forward or backward in a
call of its own; the schedule contains the order of these calls on each rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from memprof.recorder.compiled.late_import import LateImport
from memprof.trace.files.rank_roles import StageSurvey

if TYPE_CHECKING:
    from memprof.recorder.dry.ranks.role import Role

_PACKAGE = "torch.distributed.pipelining"
_FORWARD, _BACKWARD = "forward_one_chunk", "backward_one_chunk"
#: The calls in which a stage learns its sizes; torch before 2.13 has none.
_INFERENCE = ("_compute_outputs", "_compute_input_grads")
#: Actions of a schedule that store a micro-batch, and those that free it (backward, or its part for the input).
_STORES, _FREES = "F", ("B", "I")


class PipelineStages:
    """What the stages of this rank do with one micro-batch, and how many they store at a time."""

    def __init__(self, role: Role, spool: Path, *, is_on_device: bool) -> None:
        """Changes nothing yet.

        Args:
            role: Follows this rank's operators.
            spool: The recording's spool folder, which receives the survey.
            is_on_device: Whether the job runs on a virtual GPU. Where a stage does not learn its sizes, its first
                forward is then enough, with the bytes that it stores; else also its first backward is needed.
        """
        #: Calls of which any set is enough.
        self._surveys = _INFERENCE, ((_FORWARD,) if is_on_device else (_FORWARD, _BACKWARD))
        self._role = role
        self._spool = spool
        self._before: int | None = None
        #: The digest of the first call of each kind, and the bytes that it stored, by the number of the stage.
        self._digests: dict[tuple[int, str], tuple[int, int]] = {}
        self._stages: list[int] = []
        self._stored = 0
        self._is_complete = False

    def install(self) -> None:
        """Replaces methods of torch's stages and schedules once the job has imported them."""
        folder = Path(torch.__file__).parent / "distributed" / "pipelining"
        wanted: dict[str, Callable[[ModuleType], None]] = {
            f"{_PACKAGE}.stage": self._follow_stages,
            f"{_PACKAGE}.schedules": self._follow_schedules,
        }
        LateImport(folder, wanted).install()

    def _follow_stages(self, module: ModuleType) -> None:
        kinds = [getattr(module, name, None) for name in ("_PipelineStageBase", "PipelineStage")]
        for kind in filter(None, kinds):
            for name in (name for names in self._surveys for name in names if name in vars(kind)):
                setattr(kind, name, self._followed(name, getattr(kind, name)))

    def _followed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(stage: Any, *args: Any, **kwargs: Any) -> Any:
            key = int(stage.stage_index), name
            if not self._stages or self._is_complete or key in self._digests:
                return original(stage, *args, **kwargs)
            before = self._role.begin_part()
            self._before = before if self._before is None else self._before
            allocated_bytes = torch.cuda.memory_allocated()
            result = original(stage, *args, **kwargs)
            self._digests[key] = self._role.end_part(), torch.cuda.memory_allocated() - allocated_bytes
            self._write_if_complete()
            return result

        return call

    def _follow_schedules(self, module: ModuleType) -> None:
        for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            kind: Any = getattr(module, name, None)
            if kind is not None:
                kind.step = self._stepped(kind.step)

    def _stepped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._stages:
                self._read(schedule)
            return original(schedule, *args, **kwargs)

        return step

    def _read(self, schedule: Any) -> None:
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        orders = getattr(schedule, "pipeline_order", None) or {}
        actions = orders.get(stages[0].group_rank)
        if actions:
            self._stages = [int(stage.stage_index) for stage in stages]
            self._stored = most_stored(_kinds(actions))

    def _write_if_complete(self) -> None:
        for names in self._surveys:
            keys = [(stage, name) for stage in self._stages for name in names]
            if all(key in self._digests for key in keys):
                digests = (self._before, *(self._digests[key] for key in keys))
                StageSurvey(zlib.crc32(repr(digests).encode()), self._stored).write(self._spool, self._role.rank)
                self._is_complete = True
                return


def _kinds(actions: Iterable[Any]) -> Iterator[str]:
    """Yields the kinds of actions, those inside combined ones included."""
    for action in actions:
        if action is not None:
            parts = getattr(action, "sub_actions", None)
            yield from _kinds(parts) if parts else (str(action.computation_type.value),)


def most_stored(actions: Iterable[str]) -> int:
    """Returns the maximum number of micro-batches that a rank stores at a time, summed over its stages.

    Args:
        actions: The kinds of its actions in order, as torch abbreviates them.
    """
    stored = most = 0
    for action in actions:
        stored += (action == _STORES) - (action in _FREES)
        most = max(most, stored)
    return most
