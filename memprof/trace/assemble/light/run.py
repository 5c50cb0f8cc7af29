"""The whole run of a light recording: its steps, their peaks, and the peak of every module."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.assemble.phases import phase_names
from memprof.trace.files.spool import Spool
from memprof.trace.schema import NONE, PEAK_SOURCES, Bools, Ints, ModulePeaks, Modules, StepPeaks, Steps, Texts


@dataclass(frozen=True)
class Run:
    """All steps of a run.

    Attributes:
        columns: The last row of each step, by column of the ``step_peaks`` stream. Shape (steps,).
        device: The device whose memory was counted.
        phases: Name by phase code.
    """

    columns: dict[str, Ints]
    device: str
    phases: Texts

    def __len__(self) -> int:
        return len(self.columns["step"])

    def steps(self) -> Steps:
        """Lists the steps, all of them without operators."""
        columns = self.columns
        none = np.full(len(self), NONE, dtype=np.int64)
        return Steps.of(
            step=columns["step"],
            kind=np.full(len(self), "plain", dtype=np.object_),
            start_us=columns["start_ns"] / 1000,
            duration_us=(columns["end_ns"] - columns["start_ns"]) / 1000,
            micro_batches=np.zeros(len(self), dtype=np.int64),
            optimizer_updates=columns["updates"],
            first_op_id=none,
            last_op_id=none,
            is_complete=columns["is_complete"] != 0,
        )

    def step_peaks(self) -> StepPeaks:
        """Lists the peak of each step."""
        columns = self.columns
        return StepPeaks.of(
            step=columns["step"],
            device=np.full(len(self), self.device, dtype=np.object_),
            phase=self.phases[columns["phase"]],
            module_id=columns["module"],
            allocated_bytes=columns["allocated_bytes"],
            reserved_bytes=columns["reserved_bytes"],
            how=np.array(PEAK_SOURCES, dtype=np.object_)[columns["how"]],
            end_bytes=columns["end_bytes"],
            input_elements=columns["input_elements"],
        )

    def place_at_end(self, modules: Modules, failed_at: list[int] | None) -> str:
        """Returns where the run was when it ended, such as ``step 812, backward of layers.3``."""
        if not len(self):
            return ""
        phase, module = failed_at or (int(self.columns["phase_now"][-1]), int(self.columns["module_now"][-1]))
        where = f" of {modules.name[module] or modules.type[module]}" if module != NONE else ""
        return f"step {int(self.columns['step'][-1])}, {self.phases[phase]}{where}"


def read_run(main: Spool, device: str) -> Run:
    """Reads the steps of a run."""
    columns = main.columns("step_peaks")
    # Where a step has several rows, the last one counts.
    is_last = np.ones(len(columns["step"]), dtype=np.bool_)
    is_last[:-1] = columns["step"][1:] != columns["step"][:-1]
    return Run({name: values[is_last] for name, values in columns.items()}, device, phase_names(main))


def module_peaks(main: Spool, device: str) -> ModulePeaks:
    """Lists the peak of each phase and module, with the first step that reached it."""
    columns = main.columns("module_peaks")
    order = np.lexsort((columns["step"], -columns["allocated_bytes"], columns["module"], columns["phase"]))
    ordered = {name: values[order] for name, values in columns.items()}
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = (np.diff(ordered["phase"]) != 0) | (np.diff(ordered["module"]) != 0)
    kept = {name: values[is_first] for name, values in ordered.items()}
    return ModulePeaks.of(
        module_id=kept["module"],
        phase=phase_names(main)[kept["phase"]],
        step=kept["step"],
        device=np.full(len(kept["step"]), device, dtype=np.object_),
        allocated_bytes=kept["allocated_bytes"],
    )


def join_steps(run: Steps, recorded: Steps) -> Steps:
    """Replaces counter-only steps of the run by those recorded in full."""
    is_recorded: Bools = np.isin(run.step, recorded.step)
    kept = run.take(~is_recorded)
    rows = np.searchsorted(run.step, recorded.step)
    updates = np.where(
        np.isin(recorded.step, run.step),
        run.optimizer_updates[np.minimum(rows, len(run) - 1)],
        recorded.optimizer_updates,
    )
    recorded = recorded.replace(optimizer_updates=updates)
    joined = Steps.joined((kept, recorded))
    return joined.take(np.argsort(joined.step, kind="stable"))
