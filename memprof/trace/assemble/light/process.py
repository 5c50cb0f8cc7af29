"""Assembles the tables and manifest of one lightly recorded process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from memprof.trace.assemble import texts
from memprof.trace.assemble.light.describe import light_manifest
from memprof.trace.assemble.light.device_run import assemble_device, find_snapshot
from memprof.trace.assemble.light.run import join_steps, module_peaks, read_run
from memprof.trace.assemble.light.stretch import choose_stretch, ordinary_spool
from memprof.trace.assemble.memory.elsewhere import NAME
from memprof.trace.assemble.memory.holders import holder_table
from memprof.trace.assemble.process import assemble_spool
from memprof.trace.files.spool import LIGHT_FOLDER, Spool, read_spool
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, Holders, ModulePeaks, Modules, Ops, Stacks, StepPeaks, Steps, Storages, Table

#: Name of memory that predates the stretch and is held by no model or optimizer.
_OLDER = "older than the stretch, held by no model and no optimizer"


def is_light(folder: Path) -> bool:
    """Whether a process was recorded lightly."""
    return (folder / LIGHT_FOLDER).is_dir()


def assemble_light(
    folder: Path, launch: Mapping[str, Any], exit_record: Mapping[str, Any] | None
) -> tuple[Manifest, dict[type[Table], Table]] | None:
    """Assembles one process's light recording; None when nothing was recorded.

    Args:
        folder: The process's folder in the spool.
        launch: The launch record that the parent process wrote when it started the job.
        exit_record: The exit record that the parent wrote when the job ended; None while it runs.

    Raises:
        OSError: The recording cannot be read.
        BadInputError: The snapshot of a device's history is damaged.
    """
    main = read_spool(folder / LIGHT_FOLDER)
    if not main.records.get("start") or not len(main.rows["step_peaks"]):
        return None
    snapshot = find_snapshot(folder / LIGHT_FOLDER, main)
    device = str(main.records.get("counted_device", ["cpu"])[-1])
    modules = texts.module_table(main)
    tables: dict[type[Table], Table] = {Modules: modules}
    if snapshot is not None:
        found, device = assemble_device(snapshot, folder, main)
        tables |= found
    elif device == "cpu":
        tables |= _stretch_tables(folder, main, launch, exit_record)
    if Holders not in tables:
        stacks = cast(Stacks, tables.get(Stacks, Stacks.empty()))
        tables[Holders], tables[Stacks] = holder_table(main, None, stacks)
    run = read_run(main, device)
    recorded = cast(Steps, tables.get(Steps, Steps.empty()))
    tables[Steps] = join_steps(run.steps(), recorded)
    tables[StepPeaks] = run.step_peaks()
    tables[ModulePeaks] = module_peaks(main, device)
    return light_manifest(folder, main, run, tables, launch, exit_record), tables


def _stretch_tables(
    folder: Path, main: Spool, launch: Mapping[str, Any], exit_record: Mapping[str, Any] | None
) -> dict[type[Table], Table]:
    stretch = choose_stretch(folder)
    if stretch is None:
        return {}
    found = assemble_spool(ordinary_spool(main, stretch), folder, launch, exit_record)
    if found is None:
        return {}
    tables = found[1]
    return {**tables, Storages: _categorised(cast(Storages, tables[Storages]), cast(Ops, tables[Ops]))}


def _categorised(storages: Storages, ops: Ops) -> Storages:
    """Marks activations by lifetime, since uses are not recorded: created in forward, freed in backward."""
    category, name = storages.category.copy(), storages.name.copy()
    has_both = (storages.created_op_id != NONE) & (storages.freed_op_id != NONE)
    born, died = storages.created_op_id[has_both], storages.freed_op_id[has_both]
    is_kept = (ops.phase[born] == "forward") & (ops.phase[died] != "forward")
    rows = np.flatnonzero(has_both)[is_kept]
    rows = rows[category[rows] == "temporary"]
    category[rows] = "activation"
    is_older = (storages.created_op_id == NONE) & (name == NAME)
    name[is_older] = _OLDER
    return storages.replace(category=category, name=name)
