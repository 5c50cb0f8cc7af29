"""The parent's final message: what was recorded, or why nothing was."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.trace.files.private_file import describe_fault
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.analysis.diff.budget import BudgetVerdict
    from memprof.analysis.out_of_memory.post_mortem import PostMortem
    from memprof.analysis.report.moments import Moment
    from memprof.policies.plan.plan import Plan
    from memprof.trace.files.pack import PackResult
    from memprof.trace.manifest import Capture
    from memprof.trace.store import Trace


@dataclass(frozen=True)
class Verdict:
    """The post-mortem of a recording.

    Attributes:
        sentence: What was recorded, or why nothing was.
        next_command: The command to run next, "" if there is nothing to look at.
        comparison: Predicted against measured, or the plan under which the job failed; "" without a prediction.
        budget: The run compared with its budget; None if it has none.
        has_failed: The job failed under its plan.
        is_interrupted: Whether Ctrl-C cut the verdict short.
        is_empty: Whether nothing was recorded, or nothing on the device that was asked for.
        post_mortem: Why memory ran out, if the job ended so.
        then: The command to run after the next one.
        growth: Whether memory grows, with the line and its holder; "" where it does not.
    """

    sentence: str
    next_command: str = ""
    comparison: str = ""
    budget: BudgetVerdict | None = None
    has_failed: bool = False
    is_interrupted: bool = False
    is_empty: bool = False
    post_mortem: tuple[str, ...] = ()
    then: tuple[str, ...] = ()
    growth: str = ""

    def __str__(self) -> str:
        others = (self.growth, self.sentence, self.comparison, self.budget_sentence)
        lines = [*self.post_mortem, *(line for line in others if line)]
        if self.next_command:
            lines += [f"next: {self.next_command}", *(f"then: {command}" for command in self.then)]
        return "\n".join(f"memprof: {line}" for line in lines)

    @property
    def budget_sentence(self) -> str:
        """Whether the run stayed within its budget; "" if it has none.

        For a failed job, recorded steps within the budget prove nothing.
        """
        if self.budget is None or (self.has_failed and self.budget.fits is not False):
            return ""
        return self.budget.describe()


def describe_recording(result: PackResult, target: str) -> Verdict:
    """Returns the verdict on a recording."""
    from memprof.analysis.allocator.device_verdict import dry_fit
    from memprof.analysis.allocator.uncertainty import describe_torch
    from memprof.analysis.host.host_forecast import HostForecast
    from memprof.analysis.host.host_use import HostUse
    from memprof.analysis.leaks.leaks import growth_notice
    from memprof.analysis.out_of_memory.post_mortem import examine
    from memprof.analysis.ranks.rank_report import compare_ranks, job_notes
    from memprof.analysis.report.notes import describe_steps
    from memprof.analysis.report.whole_loop import describe_moments
    from memprof.analysis.report.whole_run import describe_highest, describe_later
    from memprof.errors import BadInputError
    from memprof.trace.files.spool import COMPILED, DRY_RUN, KILLED, MISSED_STEP, RAN_OUT, UNUSED_DEVICE
    from memprof.trace.store import Trace

    trace = Trace.open(result.path)
    use = HostUse.of(trace)
    forecast = HostForecast.of(trace, use)
    expected = "" if forecast is None else f"Host memory to expect: {forecast.headline}."
    of_host = " ".join(filter(None, (expected, *(forecast or use).warnings())))
    ends = tuple(note for note in trace.manifest.notes if note.startswith((RAN_OUT, KILLED)))
    compared = compare_ranks(trace) if len(trace.ranks) > 1 else None
    if compared is not None and compared.worst is not None:
        trace = trace.rank_trace(compared.worst)
    size = format_bytes(result.path.stat().st_size)
    steps = f"{result.steps_recorded} step{'' if result.steps_recorded == 1 else 's'}"
    what = steps if result.steps_recorded else "only the warm-up"
    of_ranks = f" in {len(trace.ranks)} processes" if compared is not None else ""
    of_worst = f" of rank {trace.rank}" if compared is not None and compared.peak and compared.peak.bytes else ""
    has_operators = True
    try:
        steps_differ = describe_steps(trace.step_peaks())
        finding = f": peak {_describe_peak(_find_peak(trace), of_worst)}{steps_differ and f'; {steps_differ}'}"
    except BadInputError:
        finding, has_operators = " without a single operator", False
    did = f"recorded {what} of {target}{of_ranks}"
    if followed := describe_highest(trace):
        did = f"followed {target}{of_ranks}: {followed}. {what.capitalize()} in full"
        if not has_operators:
            did, finding = f"followed {target}{of_ranks}: {followed}. No step was recorded in full", ""
    is_dry = trace.manifest.backend.name == DRY_RUN
    if is_dry:
        did = f"dry-ran {what} of {target}{of_ranks}"
    unused = next((note for note in trace.manifest.notes if note.startswith(UNUSED_DEVICE)), "") if is_dry else ""
    if unused:
        did, finding = f"nothing was recorded on the virtual GPU: {unused}. {did[:1].upper()}{did[1:]}", ""
    elif not has_operators and not followed:
        did = f"nothing was recorded: {target} ended before the first operator of a step"
    sentence = f"{did}{finding}. {result.path} holds {size}."
    part = _describe_part(result.path)
    early = _describe_end(trace.manifest.capture) if compared is None else ""
    failure = examine(trace)
    fit = dry_fit(trace) if failure is None or failure.is_caught else None
    compiled = [f"{note}." for note in trace.manifest.notes if is_dry and note.startswith(COMPILED)]
    torch = describe_torch(trace) if is_dry and fit is None else ""
    made_up = f"Dry run: {torch}{'; ' if torch else ''}values printed by the job are placeholders." if is_dry else ""
    fits = fit.describe() if fit is not None else ""
    missed = [f"{note[:1].upper()}{note[1:]}." for note in trace.manifest.notes if note.startswith(MISSED_STEP)]
    moments = describe_moments(trace) if trace.manifest.budget_bytes is None else ""
    sentences = [
        sentence,
        describe_later(trace),
        fits,
        f"Moments: {moments}." if moments else "",
        *compiled,
        made_up,
        early,
        *missed,
        result.remark,
        of_host,
        *job_notes(trace, is_part=bool(part)),
        part,
    ]
    shown = shlex.quote(str(result.path))
    command = f"memprof report {shown}"
    if fit is not None and not fit.fits:
        from memprof.analysis.plans.another_plan import unused_file

        command = f"memprof suggest {shown} --device {shlex.quote(fit.machine)} --write {unused_file('plan', '.toml')}"
    is_empty = bool(unused) or not (has_operators or followed)
    growth = growth_notice(trace)
    then = (f"{command} --leaks",) if growth and fit is None else ()
    verdict = Verdict(" ".join(filter(None, sentences)), command, is_empty=is_empty, then=then, growth=growth)
    verdict = verdict if failure is None else _with_post_mortem(verdict, trace, failure)
    return replace(verdict, post_mortem=(*ends, *verdict.post_mortem))


def _describe_part(path: Path) -> str:
    """Returns how to open the file of one node or rank together with the others; "" for a whole job's."""
    stem, _, part = path.name.removesuffix(".memprof").rpartition(".")
    if not stem or not re.fullmatch(r"node-?[\w-]+|rank\d+", part):
        return ""
    return f"It is one part of {stem}.memprof, which opens as a whole once all other parts are in the same folder."


def _with_post_mortem(verdict: Verdict, trace: Trace, found: PostMortem) -> Verdict:
    """Adds why memory ran out, and what to do about it."""
    from memprof.analysis.out_of_memory.out_of_memory_words import describe_post_mortem, next_steps
    from memprof.analysis.report.whole_run import is_light

    explained = replace(verdict, post_mortem=tuple(describe_post_mortem(found)))
    if found.is_caught or is_light(trace):
        return explained
    commands = [command for command, _ in next_steps(found, str(trace.path), trace.manifest)]
    return replace(explained, next_command=commands[0], then=(*commands[1:], *verdict.then))


def describe_missed(plan: Plan, applied: set[int]) -> list[str]:
    """Returns which policies of a plan were applied to no model by the time the job ended.

    Args:
        plan: The plan.
        applied: Numbers of the policies that were applied.
    """
    if not plan.policies:
        return []
    if not applied:
        return ["the plan was not applied: no model of the job was called in training."]
    missed = [policy.describe() for number, policy in enumerate(plan.policies) if number not in applied]
    return [f"policies not applied to any model called in training: {', '.join(missed)}."] if missed else []


def describe_nothing(spool: Path, target: str, returncode: int) -> Verdict:
    """Returns the verdict when nothing was recorded, with the reason.

    Args:
        spool: The spool folder, still there.
        target: The job, as the user named it.
        returncode: The job's exit status, negative for a signal.
    """
    reason = _why_nothing(spool, target)
    return Verdict(f"nothing was recorded: {reason} ({describe_status(returncode)}).", is_empty=True)


def describe_status(returncode: int) -> str:
    """Returns how a process ended: ``it ended with status 3``, ``it was killed by SIGKILL``."""
    if returncode >= 0:
        return f"it ended with status {returncode}"
    try:
        return f"it was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"it was killed by signal {-returncode}"


def _why_nothing(spool: Path, target: str) -> str:
    logs = sorted(spool.glob("bootstrap-*.log")) + sorted(spool.glob("recorder-*.log"))
    for path in logs:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        # The last line of a traceback names the error.
        message = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if message:
            return f"the recorder could not start in {target}: {message}"
    if not spool.is_dir():
        return f"{spool}, to which recorders write, was removed while {target} ran"
    if not (spool / "python-started").exists():
        return (
            f"{target} ran no Python that loads the recorder. python -I, -E and -S disable it, and so does a cleared "
            "environment"
        )
    if not (spool / "torch-imported").exists():
        return f"{target} never imported torch"
    if not any(spool.glob("process-*/")):
        from memprof.trace.files.spool import UNTRAINED

        if (spool / UNTRAINED).exists():
            return (
                f"{target} called its models without gradients only, and a job with an optimizer is recorded from its "
                "first training step on. Record the calls with 'with memprof.record(\"run.memprof\"):' around them, or "
                "dry-run the job"
            )
        began = "; a dry run begins with the first of them, and runs normally until then" if _is_dry(spool) else ""
        return f"{target} imported torch, but never called a model or an optimizer, nor ran backward{began}"
    folders = sorted(spool.glob("process-*/"))
    if not any(path.is_file() for folder in folders for path in folder.rglob("*")):
        return f"{target} called a model, but no recorder could create a file: the disk is full, or the job forbids it"
    if faults := [fault for folder in folders for fault in _texts(folder, "faults") if fault.strip()]:
        return f"{target} called a model, but {describe_fault(faults[-1])}"
    if notes := [note for folder in folders for note in _texts(folder, "notes")]:
        return f"{target}: {notes[-1]}"
    return f"{target} called a model, but ended before the first operator of a step was recorded"


def _texts(folder: Path, stream: str) -> list[str]:
    """Returns the notes or faults written by a process's recorder, including a light one."""
    from memprof.trace.files.spool import LIGHT_FOLDER, read_spool

    found = []
    for place in (folder, folder / LIGHT_FOLDER):
        # The spool is missing, or the process ended before its first record.
        with contextlib.suppress(OSError, ValueError):
            found += [str(text) for text in read_spool(place).records.get(stream, [])]
    return found


def _is_dry(spool: Path) -> bool:
    try:
        return bool(json.loads((spool / "launch.json").read_bytes())["options"]["dry_run"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # a spool folder without launch.json, or with a truncated one


def _find_peak(trace: object) -> Moment:
    from memprof.analysis.report.moments import find_peak
    from memprof.analysis.report.sources import find_sources
    from memprof.trace.store import Trace

    assert isinstance(trace, Trace)
    step = trace.fullest_step()
    return find_peak(step, find_sources(step.stacks))


def _describe_peak(peak: Moment, of_rank: str) -> str:
    module = f" of {peak.module_title}" if peak.module_title is not None else ""
    source = f", {peak.source.place}" if peak.source else ""
    return (
        f"{format_bytes(peak.allocated_bytes)} in step {peak.step}{of_rank}, {peak.phase}{module} ({peak.op}){source}"
    )


def _describe_end(capture: Capture) -> str:
    if capture.is_complete:
        return ""
    place = f" in {capture.ends_at}" if capture.ends_at else ""
    reason = f": {capture.reason}" if capture.reason else ""
    return f"It ends early{place}{reason}."
