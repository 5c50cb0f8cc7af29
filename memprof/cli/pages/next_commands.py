"""The commands that `memprof suggest` recommends next."""

from __future__ import annotations

import shlex
from pathlib import Path

from memprof.analysis.plans.dry_check_results import Checked, worth_keeping
from memprof.analysis.plans.predict import words_for_record
from memprof.analysis.plans.suggest import Suggestion
from memprof.emit.switches import switches_of
from memprof.launch.dry.dry_job import find_recorded_device
from memprof.policies.compile.policy import Compile
from memprof.policies.rewrite.stack_marks import is_in_compiled_code
from memprof.trace.manifest import Manifest
from memprof.trace.secrets import is_masked

#: A command and what it is for.
Command = tuple[str, str]


def next_commands(found: Suggestion, written: Path | None, checked: tuple[Checked, ...] | None) -> list[Command]:
    """Returns the commands to run next, the most useful first.

    Args:
        found: The result of the search.
        written: Path the fastest plan was written to; None if it was not.
        checked: Its plans that were dry-run; None if not requested.
    """
    suggest = f"memprof suggest {shlex.quote(found.trace)}"
    if machine := _machine(found):
        suggest += f" --machine {shlex.quote(machine)}"
    if found.basis.batch is not None:
        suggest += f" --at-batch {found.basis.batch}"
    if found.basis.length is not None:
        suggest += f" --at-length {found.basis.length}"
    answer = found.answer
    host = "" if (most := answer.search_request.most_host_bytes) is None else f",pinned={most}"
    again = f"{suggest} --budget {answer.search_request.budget_bytes}{host}"
    compiled = [(f"{again} --compile", "tries the compiler's own budgets")] if _may_be_compiled(found) else []
    if answer.best is None:
        return [*compiled, (f"{suggest} --budget {answer.search_request.needed(answer.least)}{host}", "what fits")]
    check = [(f"{again} --check", "dry-run the job under it (seconds)")] if _may_be_dry_run(found) else []
    is_known = answer.best.interval.is_exact
    if written is not None:
        train = _train(found, written)
        return [train] if is_known or checked is not None else [*check, train]
    if checked:
        kept = worth_keeping(checked)
        if kept is None:
            least = min((one.dry_bytes for one in checked if one.dry_bytes is not None), default=None)
            more = (f"{again} --check {2 * len(checked)}", "dry-run more plans")
            return [more] if least is None else [more, (f"{suggest} --budget {least} --check", "what a dry run took")]
        return [(f"{again} --check --write plan.toml", "keep it, to train under it")]
    keep = (f"{again} --write plan.toml", "keep the fastest, to train under it")
    # Plans whose peak is not exact are checked first.
    first = [keep, *check] if is_known else [*check, keep]
    switches = switches_of(found.basis.step, answer.best.plan)
    own = [(f"{again} --emit {switches.target}", switches.words)] if switches is not None else []
    return [*first, *compiled, (f"{again} --explain 1", "what it does, policy by policy"), *own]


def _machine(found: Suggestion) -> str:
    """Returns the device that was searched for, also where it is the recording's own; "" for a size."""
    is_own = found.answer.search_request.counts_reserved and not found.basis.machine
    return find_recorded_device(found.manifest) if is_own else found.basis.machine


def _train(found: Suggestion, written: Path) -> Command:
    """Returns the command that runs the job under a plan: a dry run where the recording is one of several ranks."""
    plan, job = shlex.quote(str(written)), words_for_record(found.manifest)
    batch = "" if found.basis.batch is None else f" with the job's batch set to {found.basis.batch}"
    length = "" if found.basis.length is None else f" on sequences of {found.basis.length}"
    if found.manifest.dry_ranks:
        dry = f"memprof record {_dry_flags(found.manifest)} --plan {plan} {job}"
        return (dry, f"dry-run its ranks under it{batch}{length}")
    place = f" on {found.basis.machine}" if found.basis.machine else ""
    return (f"memprof record --plan {plan} {job}", f"train under it{place}{batch}{length}, and compare")


def _dry_flags(manifest: Manifest) -> str:
    """Returns the options of the dry run that a recording of several ranks is."""
    device = f" --device {shlex.quote(name)}" if (name := find_recorded_device(manifest)) else ""
    nodes = f" --nodes {manifest.dry_nodes}" if manifest.dry_nodes > 1 else ""
    return f"--dry-run{device} --ranks {manifest.dry_ranks}{nodes}"


def _may_be_dry_run(found: Suggestion) -> bool:
    """Returns whether a dry run can check a plan: the command line starts the whole job, and the size is unchanged."""
    command = found.manifest.command
    return bool(command) and not is_masked(command) and not found.manifest.dry_ranks and not found.basis.at


def _may_be_compiled(found: Suggestion) -> bool:
    """Returns whether the job is compiled, and its compiler has been given no budget yet."""
    request = found.answer.search_request
    is_open = not request.measured and Compile.name not in request.forbid and not found.basis.machine
    return is_open and _may_be_dry_run(found) and bool(is_in_compiled_code(found.basis.step).any())
