"""The recording's output: its path, chosen and claimed before the job starts, and its upload to an fsspec address."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.errors import MemprofError, OutputError
from memprof.launch.outcome.plan_marks import read_idle
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import CannotStartError, Target
from memprof.launch.torch_versions import torch_pin
from memprof.trace.files.place import find_place, refuse_existing
from memprof.trace.files.private_file import FOLDER_MODE, explain_write_error, write_private
from memprof.trace.files.rank_roles import read_between, read_communicators, read_same
from memprof.trace.files.reading import attempt, located
from memprof.trace.files.spool import READ_VALUES
from memprof.trace.launchers import rank_in
from memprof.trace.running import is_being_written, process_space
from memprof.trace.secrets import mask_text, mask_words
from memprof.version import __version__

if TYPE_CHECKING:
    from memprof.trace.manifest import Speed  # imports numpy


def spool_of(output: Path) -> Path:
    """Returns the spool folder of an output file."""
    return output.with_name(output.name + ".spool")


def claim_output(target: Target, settings: Settings, part: str | None = None) -> Path:
    """Chooses the output file and creates its spool folder, which claims the name for this recording.

    Args:
        target: The job, for the default name.
        settings: Where to write, and whether an older recording may be overwritten.
        part: The part of the job that is recorded; detected if None.

    Returns:
        The output file, which does not exist yet or may be overwritten. Its spool folder exists, and is empty.

    Raises:
        CannotStartError: A recording exists already, or the location is not writable.
    """
    part = find_part(target.arguments, os.environ) if part is None else part
    if settings.address:
        check_address(address_of(settings.address, part), force=settings.force)
    if settings.output is not None:
        output = with_part(settings.output, part)
        _make_room(output, force=settings.force)
        _make_spool(output)
        return output
    stem = f"{target.stem}.{time.strftime('%Y%m%d-%H%M%S')}"
    count = 1
    while True:
        output = with_part(Path(f"{stem}{f'-{count}' if count > 1 else ''}.memprof"), part)
        count += 1
        if output.exists() or spool_of(output).exists():
            continue
        try:
            _make_spool(output)
        except FileExistsError:
            # Another recording of the same script started in the same second, and took the name meanwhile.
            continue
        return output


def address_of(address: str, part: str) -> str:
    """Returns the upload address for one part of a job."""
    folder, slash, name = address.rpartition("/")
    return f"{folder}{slash}{with_part(Path(name), part).name}"


def write_launch(spool: Path, target: Target, settings: Settings) -> None:
    """Writes ``launch.json``, which describes the job, the settings and the recording process, and values to replay.

    Raises:
        CannotStartError: The file cannot be written.
    """
    launch = {
        "command": list(target.arguments if settings.keep_arguments else mask_words(target.arguments)),
        "target": target.name if settings.keep_arguments else mask_text(target.name),
        "started_us": time.time_ns() / 1000,
        "memprof_version": __version__,
        "options": {
            "skip": settings.skip,
            "steps": settings.steps,
            "stop": settings.stop,
            "light": settings.light,
            **({"dry_run": True, "torch_pin": torch_pin(target.arguments)} if settings.dry_run else {}),
            **({} if settings.budget_bytes is None else {"budget_bytes": settings.budget_bytes}),
            **({"ranks": settings.ranks} if settings.ranks else {}),
        },
        "parent_pid": os.getpid(),
        "process_space": process_space(),
    }
    try:
        write_private(spool / "launch.json", json.dumps(launch))
        if settings.read_values:
            write_private(spool / READ_VALUES, settings.read_values)
    except OSError as error:
        shutil.rmtree(spool, ignore_errors=True)
        reason, way_out = explain_write_error(error, "Free some space, or choose -o.")
        raise CannotStartError(f"{spool} cannot be written: {reason}. {way_out}") from None


def write_exit(spool: Path, returncode: int | None, killed: str = "", *, is_running: bool = False) -> None:
    """Writes ``exit.json``, which records how the job ended.

    Args:
        spool: The recording's spool folder.
        returncode: The job's exit status, negative for a signal; None for a job of another's, whose status is unknown.
        killed: That the kernel killed it for lack of memory, in a sentence; "" if it did not.
        is_running: Whether such a job goes on.

    Raises:
        OSError: The file cannot be written.
    """
    status = {"is_running": is_running} if returncode is None else {"returncode": returncode}
    ended: dict[str, object] = {**status, "ended_us": time.time_ns() / 1000}
    if idle := read_idle(spool):
        ended["without_effect"] = idle
    if killed:
        ended["killed"] = killed
    if same := read_same(spool):
        ended["same_ranks"] = same
    if between := read_between(spool):
        ended["between"] = between
    if communicators := read_communicators(spool):
        ended["communicators"] = communicators
    write_private(spool / "exit.json", json.dumps(ended))


def add_speed(spool: Path, speed: Speed) -> None:
    """Adds the machine's speed to ``exit.json``; left out if the disk is full."""
    path, fresh = spool / "exit.json", spool / "exit.json.new"
    try:
        ended = json.loads(path.read_text(encoding="utf-8"))
        write_private(fresh, json.dumps({**ended, "speed": speed.to_json()}))
        fresh.replace(path)  # atomic: the job's exit status must not be lost over the machine's speed
    except OSError:
        fresh.unlink(missing_ok=True)


def refuse_taken(path: Path, *, force: bool) -> None:
    """Rejects a path taken by something that may not be overwritten.

    A recording grows in a folder next to its file and is packed at the end, so it cannot go to a device or a pipe.

    Raises:
        CannotStartError: The path is an existing file that may not be overwritten, or a device, pipe, socket or folder.
    """
    try:
        place = find_place(path)
        if place.is_stream:
            raise CannotStartError(f"{path} is a device or a pipe. Name a file with -o.")
        refuse_existing(place, force=force, option="-o")
    except OutputError as error:
        raise CannotStartError(str(error)) from None


def _make_room(output: Path, *, force: bool) -> None:
    """Removes an older recording's spool if it may be overwritten.

    Raises:
        CannotStartError: The path is taken.
    """
    spool = spool_of(output)
    if output.is_dir():
        raise CannotStartError(f"{output} is a folder. Name a file: -o {output / 'run.memprof'}")
    refuse_taken(output, force=force)
    if not spool.exists():
        return
    if is_being_written(spool):
        raise CannotStartError(f"{output} is being recorded by another memprof. Choose another name with -o.")
    if not force:
        raise CannotStartError(
            f"{spool} holds a recording that was cut short. Read it with memprof report {spool}, "
            "replace it with -f, or choose another name with -o."
        )
    try:
        shutil.rmtree(spool)
    except OSError as error:
        raise CannotStartError(f"{spool} cannot be replaced: {error.strerror}. Choose another name with -o.") from None


def _make_spool(output: Path) -> None:
    folder = output.parent
    if not folder.is_dir():
        raise CannotStartError(f"no folder {folder} to write {output.name} to: create it, or choose another with -o.")
    try:
        spool_of(output).mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        raise
    except OSError as error:
        raise CannotStartError(
            f"nothing can be written to {folder.resolve()}: {error.strerror}. Choose another folder with -o."
        ) from None


#: Options of torchrun, deepspeed and accelerate for the number of nodes and for this node's rank.
_NODES = ("--nnodes", "--num_nodes", "--num-nodes", "--num_machines", "--num-machines")
_NODE = ("--node_rank", "--node-rank", "--machine_rank", "--machine-rank")


def find_part(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Returns the name of the part that this parent records: ``node1``, ``rank3``, or "" for the whole job.

    Either one parent per node starts the ranks there (torchrun, accelerate), or a launcher starts one parent per rank
    (mpirun, srun). With the same file name, they would overwrite one another.
    """
    # `1:4` is a job of one to four nodes.
    nodes = _option(arguments, _NODES) or environment.get("PET_NNODES", "")
    most = nodes.rpartition(":")[2]
    if most.isdecimal() and int(most) > 1:
        for given in (
            _option(arguments, _NODE),
            environment.get("PET_NODE_RANK", ""),
            environment.get("SLURM_NODEID", ""),
        ):
            if given.isdecimal():
                return f"node{int(given)}"
        # The nodes agree on their numbers only at the rendezvous.
        return f"node-{re.sub(r'[^A-Za-z0-9-]+', '-', platform.node())}"
    rank, size = rank_in(environment)
    return f"rank{rank}" if size > 1 else ""


def with_part(output: Path, part: str) -> Path:
    """Returns the file of a part: ``run.node1.memprof`` for ``run.memprof``."""
    if not part:
        return output
    stem, dot, suffix = output.name.rpartition(".")
    return output.with_name(f"{stem}.{part}.{suffix}" if dot and stem else f"{output.name}.{part}")


def _option(arguments: Sequence[str], names: Sequence[str]) -> str:
    """Returns the value of the first matching option on a command line, "" if there is none."""
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(arguments[place + 1 : place + 2]), "")
    return ""


def check_address(address: str, *, force: bool) -> None:
    """Checks, before the job starts, that a recording can be uploaded to an address.

    Args:
        address: The address.
        force: Whether a recording there may be overwritten.

    Raises:
        CannotStartError: The fsspec backend is not installed, the address is unreachable, or a recording exists there.
    """
    try:
        is_there = bool(attempt(address, located(address).exists))
    except MemprofError as error:
        raise CannotStartError(str(error)) from None
    if is_there and not force:
        raise CannotStartError(f"{address} exists already. Replace it with -f, or choose another name with -o.")


def upload(path: Path, address: str) -> None:
    """Uploads a recording, and deletes the local file once the upload is complete.

    Raises:
        MemprofError: The upload failed; the local file stays, and no partial upload remains.
    """
    # An fsspec file system, and the path inside it: `Path` handles neither.
    target: Any = located(address)
    size = path.stat().st_size

    def copy() -> None:
        try:
            target.fs.put_file(str(path), target.path)
            if target.stat().st_size != size:
                raise OSError(f"only {target.stat().st_size:,} of {size:,} bytes arrived")
        except BaseException:
            with contextlib.suppress(Exception):  # a failed upload may not be removable either
                target.unlink()
            raise

    attempt(address, copy)
    path.unlink()
