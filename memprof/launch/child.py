"""Starts the recorder in a process of a recorded job, after torch is imported."""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memprof.launch.outcome.plan_marks import refuse
from memprof.launch.own_files import write_own_files
from memprof.launch.torch_versions import mark_if_newer
from memprof.recorder.light.recorder import LightRecorder
from memprof.recorder.profiler.native import AllocatorTable, NativeEvents
from memprof.recorder.profiler.timing import FILE_NAME as SPEED_FILE
from memprof.recorder.profiler.timing import write_device_speed
from memprof.recorder.recorder import Recorder
from memprof.recorder.steps.window import Window
from memprof.trace.files.private_file import write_private

if TYPE_CHECKING:
    from memprof.launch.under_plan import UnderPlan
    from memprof.machines.card import Card
    from memprof.virtual.run import DryRun

_recorder: Recorder | LightRecorder | None = None
_plan: UnderPlan | None = None
_card: Card | None = None
_dry: DryRun | None = None


def install(settings: dict[str, Any]) -> None:
    """Installs the recorder in this process and in its forked children.

    Args:
        settings: `spool` (the job's spool folder), `skip`, `steps`, `stop` and `goes_on`; `light` to follow the whole
            run instead; `dry_run` to compute nothing, on the simulated `device` if given, whose requests fail where it
            is full if `strict`; where its loaders' batches are read to the file `survey` within `survey_s` seconds if
            given, and where the job's own `snapshots` are collected if given; and `plan`, the plan to run under as
            TOML, if there is one.

    Raises:
        SystemExit: The plan cannot be read in this process; the job ends.
    """
    global _plan, _dry  # noqa: PLW0603 - one of each per process, the plan shared with its forked children
    spool = Path(settings["spool"])
    is_light = bool(settings.get("light"))
    is_dry = bool(settings.get("dry_run"))
    counts = int(settings["skip"]), int(settings["steps"]), bool(settings["stop"])
    is_whole = bool(settings.get("whole"))
    goes_on = bool(settings.get("goes_on"))
    window = None if is_light else Window(*counts, is_dry=is_dry, is_whole=is_whole, goes_on=goes_on)
    if settings.get("plan"):
        # Imported here: a job without a plan imports no policies.
        try:
            from memprof.launch.under_plan import under_plan
        except ImportError as error:
            refuse(f"the plan cannot be read in the job: {error}.", spool)
        _plan = under_plan(settings["plan"], spool)
    with suppress(OSError):  # a full disk
        mark_if_newer(torch.__version__, spool)
    try:
        if not is_dry:
            NativeEvents.initialize()
        _dry = _dry_run(spool, settings) if is_dry else None
        _start(spool, window, _dry)
    except Exception as error:
        if _plan is not None:
            # Without the recorder, model calls are not seen: the job would train without the plan.
            _plan.refuse(f"the recorder could not start, so the plan was not applied: {error}")
        raise
    atexit.register(_finish, spool)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _start_in_child(spool, window))


def prepare_ranks() -> None:
    """Imports what every dry-run rank imports, before the ranks are forked from this process."""
    from memprof.recorder.memory.live_objects import freeze_imports
    from memprof.virtual.run import import_all

    import_all()
    freeze_imports()


def leave_quickly() -> None:
    """Skips the garbage collection at the end of a forked rank, which would take half a second of a core.

    Files that only this collection would have closed are flushed.
    """
    from memprof.recorder.memory.live_objects import live_objects

    for file in live_objects(io.IOBase):
        with suppress(Exception):  # closed, or the job's own
            file.flush()
    gc.freeze()


def is_recording() -> bool:
    """Whether this process is recorded by `memprof record`."""
    return _recorder is not None


def has_plan() -> bool:
    """Whether `memprof record` runs this process under a plan."""
    return _plan is not None


def _dry_run(spool: Path, settings: dict[str, Any]) -> DryRun:
    global _card  # noqa: PLW0603 - one device per process
    from memprof.virtual.run import DryRun  # imports modules that a recorded job must not load

    device, device_name = None, settings.get("device", "")
    if device_name:
        from memprof.machines.card import find_card
        from memprof.policies.allocator.policy import options_in_force
        from memprof.virtual.device.current import ORDINALS
        from memprof.virtual.device.job_snapshots import SnapshotRequest
        from memprof.virtual.device.virtual_device import VirtualDevice

        _card = find_card(device_name)
        ORDINALS.count = int(settings.get("devices") or os.environ.get("LOCAL_WORLD_SIZE", "1"))
        folder = settings.get("snapshots")
        request = SnapshotRequest(Path(folder), settings.get("snapshot_name", "")) if folder else None
        device = VirtualDevice(_card, options_in_force(os.environ), request, is_strict=bool(settings.get("strict")))
    dry = DryRun(
        lambda sentence: refuse(sentence, spool),
        spool,
        device,
        is_given_rank=bool(settings.get("ranks")),
        expert_load=float(settings.get("expert_load", 1.0)),
        is_whole=bool(settings.get("whole")),
    )
    dry.install()
    if settings.get("survey"):
        from memprof.virtual.data_survey import DataSurvey

        DataSurvey(Path(settings["survey"]), float(settings["survey_s"]), _current_step).install()
    return dry


def _current_step() -> int:
    return 0 if _recorder is None else _recorder.current_step


def _start(spool: Path, window: Window | None, dry: DryRun | None = None, *, is_late: bool = False) -> None:
    """Starts the recorder of a window; without a window, that of the whole run."""
    global _recorder  # noqa: PLW0603 - one recorder per process, needed at exit and after fork
    folder = spool / f"process-{os.getpid()}"
    if window is None:
        _recorder = LightRecorder(folder, is_late=is_late, plan=_plan)
    else:
        _recorder = Recorder(folder, window, is_late=is_late, plan=_plan, dry=dry)
    _recorder.install()


def _start_in_child(spool: Path, window: Window | None) -> None:
    """Records a forked child separately: it may be a training rank. A data loader's worker records nothing."""
    # Once the parent's window is over, its allocation table is no longer maintained.
    is_late = not AllocatorTable.is_kept()
    if _recorder is not None:
        _recorder.abandon()
    _start(spool, window, is_late=is_late)


def _finish(spool: Path) -> None:
    if _recorder is not None:
        # Python keeps the exception whose traceback it prints.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        # An exception from a signal handler of the job would otherwise have occurred after the job's end.
        with suppress(Exception):
            _recorder.finish("the job ended", error)
        if _dry is not None:
            with suppress(OSError):  # a full disk
                _dry.rank.role.write()
        with suppress(Exception):  # a full disk, or modules of the job's that are no modules
            write_own_files(spool)
        with suppress(Exception):  # a full disk, or functions of Python that the job has replaced
            folder = spool / f"process-{os.getpid()}"
            if _card is None:
                write_device_speed(folder)
            elif folder.is_dir():
                write_private(folder / SPEED_FILE, json.dumps(_card.speed()))
