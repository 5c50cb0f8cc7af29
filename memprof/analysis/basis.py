"""The step that plans are made for: one of a recording, with the times of the machine it is to run on."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.analysis.light import refuse_light
from memprof.analysis.out_of_memory import has_whole_step
from memprof.errors import InconclusiveError
from memprof.machines.catalogue import Accelerator, machine_of_device
from memprof.policies.base import SOURCES
from memprof.policies.swap.policy import DEFAULT_GBPS
from memprof.replay.scale import TimesElsewhere, rates_of, rates_of_recording, scale_times
from memprof.trace.schema import Steps
from memprof.trace.step import Step
from memprof.trace.store import Trace


@dataclass(frozen=True, eq=False)
class Basis:
    """The step that plans are made for.

    Attributes:
        step: The step; its times are those of the machine it is to run on.
        machine: Name of that machine where it is another than the recording's, "" otherwise.
        elsewhere: How its times were obtained then; None where they are the recording's own.
        warnings: What a reader must know of that.
        batch: The batch that was asked for, None for the recorded one.
        scaled_by: How the step is known at that batch, one of policies.base.SOURCES; "" where it was recorded so.
    """

    step: Step
    machine: str = ""
    elsewhere: TimesElsewhere | None = None
    warnings: tuple[str, ...] = ()
    batch: int | None = None
    scaled_by: str = ""

    @property
    def source(self) -> str:
        """How the step and its times are known, one of policies.base.SOURCES."""
        is_scaled = self.elsewhere is not None and self.elsewhere.scaled_share > 0
        times = "modelled" if is_scaled else "replayed"
        return max(times, self.scaled_by or times, key=SOURCES.index)


def basis_of(trace: Trace, step_number: int | None = None, machine: Accelerator | None = None) -> Basis:
    """Returns the step to plan for.

    Args:
        trace: The recording.
        step_number: The step; None for the steady one.
        machine: The machine it is to run on; None for the recording's own.

    Raises:
        BadInputError: The trace holds no operators, or is damaged.
        InconclusiveError: No step was recorded to its end, such as when the job ran out of memory in its first.
        UsageError: There is no such step.
    """
    refuse_light(trace)
    step = steady_step(trace, step_number)
    recorded_on = trace.manifest.machine
    if machine is None or machine_of_device(recorded_on.device_name) is machine:
        return Basis(step)
    elsewhere = scale_times(step, rates_of_recording(recorded_on), rates_of(machine))
    if recorded_on.device_kind != "cpu":
        return Basis(elsewhere.step, machine.name, elsewhere)
    warning = (
        f"this job was recorded on a CPU: {machine.name} runs other kernels, whose workspaces and saved tensors "
        "differ. Plan from a recording made on such a device where you can."
    )
    return Basis(elsewhere.step, machine.name, elsewhere, (warning,))


def steady_step(trace: Trace, step_number: int | None) -> Step:
    """Returns a step as it was recorded; the steady one unless another is asked for.

    Raises:
        InconclusiveError: No step was recorded to its end, such as when the job ran out of memory in its first.
    """
    if step_number is None and (trace.table(Steps).first_op_id >= 0).any() and not has_whole_step(trace):
        raise InconclusiveError(
            f"{trace.path} holds no step that was seen to its end ({trace.manifest.capture.reason or 'cut short'}), so "
            "how much its backward and its optimizer need is not known. Record the job with a smaller batch that "
            "fits, and ask for a plan from that."
        )
    return trace.steady_step() if step_number is None else trace.step(step_number)


def link_of(trace: Trace, machine: Accelerator | None = None) -> float:
    """Returns the bandwidth to where swapped values go, in bytes a microsecond: measured, or what is usual."""
    if machine is not None and machine.host_bytes_per_us:
        return machine.host_bytes_per_us
    recorded_on = trace.manifest.machine
    if recorded_on.device_kind == "cpu" and machine is None:
        return DEFAULT_GBPS["disk"] * 1e3
    measured = min(recorded_on.speed.to_host_bytes_per_us, recorded_on.speed.from_host_bytes_per_us)
    return measured if measured and machine is None else DEFAULT_GBPS["host"] * 1e3
