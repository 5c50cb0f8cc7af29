"""What a dry run repeats of a recording (job, device, steps, values that it read), and plans that it cannot apply."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from memprof.errors import MemprofError, UsageError
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import CannotStartError, NotFoundError, Target, find_command, find_module, find_script
from memprof.machines.card import find_card
from memprof.policies.plan.plan import Plan
from memprof.trace.manifest import Manifest
from memprof.trace.schema import ReadValues
from memprof.trace.secrets import MASK, is_masked
from memprof.trace.store import Trace

#: A recorded window that ends later is not followed: a dry run would take too long to reach it.
_LAST_STEP = 16
NO_PEAKS: Mapping[int, int] = MappingProxyType({})


def find_recorded_job(manifest: Manifest) -> Target:
    """Returns the job of a recording, to be started from the current folder.

    Raises:
        CannotStartError: The recording lacks the job's command line, was made under a plan, or is a dry run of ranks.
        NotFoundError: Its script or program is missing here.
        NotExecutableError: It cannot be run.
    """
    command = manifest.command
    if not command:
        raise CannotStartError(
            "the recording does not say how its job was started, so that cannot be dry-run: record it with memprof "
            "record."
        )
    if is_masked(command):
        raise CannotStartError(
            f"the recording holds its job's command line with secrets masked ({MASK}), so that cannot be dry-run: "
            "record it with --keep-arguments, or verify the plan with a real run, memprof record --plan."
        )
    if manifest.plan:
        raise CannotStartError(
            "the job was recorded under a plan already, on top of which a dry run applies no other: search in a "
            "recording of the job as it is."
        )
    if manifest.dry_ranks:
        raise CannotStartError(
            f"the recording is a dry run of {manifest.dry_ranks:,} ranks, of which its command starts only one: check "
            f"the plan with memprof record --dry-run --ranks {manifest.dry_ranks} --plan plan.toml."
        )
    words = command[1:]
    try:
        if not Path(command[0]).name.startswith("python") or not words or words[0] in ("-", "-c"):
            return find_command(command)
        if words[0] == "-m":
            return find_module(words[1:])
        return find_command(command) if words[0].startswith("-") else find_script(words)
    except NotFoundError as error:
        raise NotFoundError(f"{error} Run the command in the folder where the job was recorded.") from None


def find_recorded_device(manifest: Manifest) -> str:
    """Returns the device that a dry run of a recording's job must simulate; "" for the CPU.

    Raises:
        CannotStartError: It was recorded on a device that a dry run cannot simulate.
    """
    machine = manifest.machine
    if machine.device_kind == "cpu":
        return ""
    try:
        return find_card(machine.device_name).machine.name
    except UsageError:
        raise CannotStartError(
            f"the job was recorded on {machine.device_name or 'a device without a name'}, which dry runs do not "
            "model: verify the plan with a real run, memprof record --plan."
        ) from None


def cover_recorded_steps(window: DryWindow, manifest: Manifest, peaks: Mapping[int, int] = NO_PEAKS) -> DryWindow:
    """Returns the window of a dry run that is compared with a recording: the recorded steps.

    Other steps may be smaller, such as those with shorter batches or without an evaluation: those that were recorded
    after the window for larger inputs are covered as well. Of steps in the window with equal peaks, the second of the
    job is enough: the first creates the optimizer state. One after it, equal as recorded, may be larger under a plan.

    Args:
        window: The configured window; kept where its steps were chosen.
        manifest: The recording's.
        peaks: Peaks of the recorded steps by their numbers, in bytes; empty where they are not known.
    """
    recorded = manifest.window
    end = recorded.skip + recorded.steps
    if window.is_chosen or not recorded.steps or end > _LAST_STEP:
        return window
    if len(peaks) > 1 and len(set(peaks.values())) == 1 and min(peaks) > 0 and max(peaks) < end:
        return replace(window, skip=1, steps=1)
    end = max([end, *(step + 1 for step in peaks if step < _LAST_STEP)])
    return replace(window, skip=recorded.skip, steps=end - recorded.skip)


def check_plan(plan: Plan | None) -> None:
    """Rejects a plan that a dry run would not apply as a real run does.

    Raises:
        CannotStartError: The plan contains such a policy; the message names it.
    """
    policies = plan.policies if plan is not None else ()
    for policy in policies:
        if policy.dry_refusal:
            raise CannotStartError(f"a dry run cannot apply {policy.describe()}: {policy.dry_refusal}")


def read_values_of(recording: Path | str) -> str:
    """Returns the values that a recorded job read, as JSON for the processes of its dry runs.

    Returns:
        Rows of the table ``read_values``; "" if it has none, or cannot be read.
    """
    try:
        values = Trace.open(recording).table(ReadValues)
    except MemprofError:
        return ""
    columns = (values.step, values.line, values.name, values.previous, values.elements, values.value)
    return json.dumps(list(zip(*(column.tolist() for column in columns), strict=True))) if len(values) else ""
