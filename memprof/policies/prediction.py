"""What a plan promises, so that a later run can be held to it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memprof.policies.model_roots import parameter_bytes_by_root
from memprof.replay.live import live_bytes, live_bytes_by_category, peak_op
from memprof.trace.schema import NONE, PHASES
from memprof.trace.step import Step


@dataclass(frozen=True)
class Prediction:
    """The step a plan leads to, in numbers.

    Attributes:
        trace: The recording it was made from.
        model: Type of the root module there, "" where there was none.
        parameter_bytes: Bytes of the model's parameters there.
        recorded_peak_bytes: Peak of the recorded step.
        recorded_step_time_us: Its duration.
        peak_allocated_bytes: Predicted peak of the step.
        peak_phase: Phase the peak is in.
        peak_module: Module that runs there, "" outside of modules.
        step_time_us: Predicted duration of the step.
        how: The least sure of the ways its policies know: replayed, modelled, rule, measured.
        phases: Highest bytes in each phase.
        categories: Bytes at the peak, by category.
        machine: The machine the step times are for, "" for that of the recording.
    """

    trace: str
    model: str
    parameter_bytes: int
    recorded_peak_bytes: int
    recorded_step_time_us: float
    peak_allocated_bytes: int
    peak_phase: str
    peak_module: str
    step_time_us: float
    how: str
    phases: dict[str, int] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)
    machine: str = ""

    @staticmethod
    def of(recorded: Step, predicted: Step, *, trace: str, how: str, machine: str = "") -> Prediction:
        """Reads the numbers off a recorded step and the one predicted from it."""
        during = live_bytes(predicted).during
        peak = peak_op(predicted)
        module = int(predicted.ops.module_id[peak])
        roots, size = np.flatnonzero(recorded.modules.parent_id == NONE), parameter_bytes_by_root(recorded)
        largest = max(roots, key=lambda root: int(size[root]), default=NONE)
        return Prediction(
            trace=trace,
            model=str(recorded.modules.type[largest]) if largest != NONE else "",
            parameter_bytes=int(size[largest]) if largest != NONE else 0,
            recorded_peak_bytes=int(live_bytes(recorded).during.max(initial=0)),
            recorded_step_time_us=float(recorded.duration_us),
            peak_allocated_bytes=int(during[peak]),
            peak_phase=str(predicted.ops.phase[peak]),
            peak_module=str(predicted.modules.name[module]) if module != NONE else "",
            step_time_us=float(predicted.duration_us),
            how=how,
            phases={
                phase: int(during[predicted.ops.phase == phase].max())
                for phase in PHASES
                if np.any(predicted.ops.phase == phase)
            },
            categories={name: int(values[peak]) for name, values in live_bytes_by_category(predicted).items()},
            machine=machine,
        )
