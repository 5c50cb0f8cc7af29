"""The commands that `memprof suggest` recommends next."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from memprof.analysis.plans.another_plan import unused_file
from memprof.analysis.plans.dry_check_results import Checked, worth_keeping
from memprof.analysis.plans.predict import commands_under
from memprof.analysis.plans.suggest import Suggestion
from memprof.emit.switches import switches_of
from memprof.machines.catalogue import find_machine
from memprof.policies.compile.policy import Compile
from memprof.policies.rewrite.stack_marks import is_in_compiled_code
from memprof.trace.secrets import is_masked

#: A command and what it is for.
Command = tuple[str, str]


def again(*more: str, without: tuple[str, ...] = ()) -> str:
    """Returns the command that runs, as it was typed, with more words.

    Args:
        more: Options with their values; what was typed of the same ones is left out.
        without: Other options to leave out.
    """
    typed = list(click.get_current_context().obj)
    for name in (*without, *(word for word in more if word.startswith("--"))):
        typed = [word for word in typed if not word.startswith(f"{name}=")]
        while name in typed:
            place = typed.index(name)
            del typed[place : place + 1 + (not (typed[place + 1 :] or ["-"])[0].startswith("-"))]
    if {"--check", "--compile"} & {*more} and "--no-run" in typed:
        typed.remove("--no-run")
    return shlex.join(("memprof", *typed, *more))


def next_commands(found: Suggestion, written: Path | None, checked: tuple[Checked, ...] | None) -> list[Command]:
    """Returns the commands to run next, the most useful first.

    Args:
        found: The result of the search.
        written: Path the fastest plan was written to; None if it was not.
        checked: Its plans that were dry-run; None if not requested.
    """
    answer = found.answer
    compiled = [(again("--compile"), "tries the compiler's own budgets")] if _may_be_compiled(found) else []
    if answer.best is None:
        return [*compiled, (_with_budget(found, answer.search_request.needed(answer.least)), "what fits")]
    over = ("-f",) if written is not None else ()
    check = [(again("--check", *over), "dry-run the job under it (seconds)")] if _may_be_dry_run(found) else []
    is_known = answer.best.interval.is_exact
    keep = ("--write", unused_file("plan", ".toml"))
    own_file = unused_file("simplest", ".toml")
    choose = again("--explain", str(found.simplest), "--write", own_file, without=("--check", "-f", "--force"))
    simplest = [(choose, "keep the simplest instead")] if found.simplest else []
    if written is not None:
        train = [*_train(found, written, is_checked=bool(checked)), *simplest]
        return train if is_known or checked is not None else [*check, *train]
    if checked:
        kept = worth_keeping(checked)
        if kept is None:
            least = min((one.dry_bytes for one in checked if one.dry_bytes is not None), default=None)
            more = (again("--check", str(2 * len(checked))), "dry-run more plans")
            return [more] if least is None else [more, (_with_budget(found, least, "--check"), "what a dry run took")]
        return [(again("--check", *keep), "keep it, to train under it")]
    first = (again(*keep), "keep the fastest, to train under it")
    # Plans whose peak is not exact are checked first.
    ordered = [first, *check] if is_known else [*check, first]
    switches = switches_of(found.basis.step, answer.best.plan)
    own = [(again("--emit", switches.target), switches.words)] if switches is not None else []
    return [*ordered, *simplest, *compiled, (again("--explain", "1"), "what it does, policy by policy"), *own]


def _with_budget(found: Suggestion, needed_bytes: int, *more: str) -> str:
    """Returns the command that runs with a larger budget, without a device that has less."""
    request = found.answer.search_request
    given = {"host": request.host.job_bytes, "pinned": request.host.pinned_bytes}
    host = "".join(f",{name}={size}" for name, size in given.items() if size is not None)
    whole = needed_bytes + request.host_used_bytes if request.is_unified else needed_bytes
    spelled = f"unified={whole}" if request.host.is_unified else str(whole)
    device = click.get_current_context().params["machine"]
    is_beyond = bool(device) and needed_bytes > find_machine(device).memory_bytes
    return again("--budget", f"{spelled}{host}", *more, without=("--device", "--machine") if is_beyond else ())


def _train(found: Suggestion, written: Path, *, is_checked: bool) -> list[Command]:
    """Returns the commands that run the job under a plan: a dry run first where the recording is one."""
    *dry, last = commands_under(found.manifest, str(written))
    batch = "" if found.basis.batch is None else f" with the job's batch set to {found.basis.batch}"
    length = "" if found.basis.length is None else f" on sequences of {found.basis.length}"
    place = f" on {found.basis.machine}" if found.basis.machine else ""
    under = "dry-run its ranks under it" if found.manifest.dry_ranks else f"train under it{place}"
    first = [] if is_checked else [(command, f"dry-run it under the plan{batch}{length}") for command in dry]
    return [*first, (last, f"{under}{batch}{length}{'' if found.manifest.dry_ranks else ', and compare'}")]


def _may_be_dry_run(found: Suggestion) -> bool:
    """Returns whether a dry run can check a plan: the command line starts the whole job, and the size is unchanged."""
    command = found.manifest.command
    return bool(command) and not is_masked(command) and not found.manifest.dry_ranks and not found.basis.at


def _may_be_compiled(found: Suggestion) -> bool:
    """Returns whether the job is compiled, and its compiler has been given no budget yet."""
    request = found.answer.search_request
    is_open = not request.measured and Compile.name not in request.forbid and not found.basis.machine
    return is_open and _may_be_dry_run(found) and bool(is_in_compiled_code(found.basis.step).any())
