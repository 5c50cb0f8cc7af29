"""How a recording was made, as HTML: machine, versions, recorder limitations, and commands to reproduce it."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime

from memprof.analysis.report import run_tables
from memprof.analysis.report.report import Report
from memprof.trace.manifest import PREDICTED, Manifest
from memprof.units import format_bytes
from memprof_dashboard.markup import Html, element, name, section, shorten, table, text
from memprof_dashboard.sources import Rank


def has_device(manifest: Manifest) -> bool:
    """Returns whether the recorded device has its own memory of known size."""
    return manifest.machine.device_kind != "cpu" and manifest.machine.capacity_bytes > 0


def recording(report: Report) -> Html:
    """Returns the recording's metadata and its steps."""
    manifest, capture = report.manifest, report.manifest.capture
    machine, backend = manifest.machine, manifest.backend
    is_device = has_device(manifest)
    facts: list[tuple[str, str]] = [
        ("job", shlex.join(manifest.command) or manifest.target),
        ("plan", report.plan),
        ("when", date_of(manifest)),
        ("versions", _versions(manifest)),
        (
            "device",
            f"{machine.device_name or machine.device_kind}{f', {machine.cores} cores' if machine.cores else ''}",
        ),
        ("memory", format_bytes(machine.capacity_bytes if is_device else machine.memory_bytes)),
        ("allocator", machine.allocator_settings),
        ("system", machine.os),
        ("ranks", f"{report.rank} of {manifest.world_size} shown" if manifest.world_size > 1 else ""),
        ("recorder", backend.name),
        ("times", manifest.op_times),
        ("complete", "yes" if capture.is_complete else f"no: {capture.ends_at} {capture.reason}".strip()),
    ]
    pairs = [part for label, value in facts if value for part in (element("dt", label), _value(value))]
    for label, texts in (("records", backend.sees), ("cannot record", backend.blind_spots)):
        if texts:
            pairs += [element("dt", label), element("dd", element("ul", *(element("li", name(t, 400)) for t in texts)))]
    remarks = [note.text for note in report.notes if not note.is_warning]
    spoken = [text for text in remarks if not text.startswith("not seen by ")]
    if spoken:
        pairs += [element("dt", "notes"), element("dd", element("ul", *(element("li", name(t, 600)) for t in spoken)))]
    return Html(element("dl", *pairs) + element("h3", "Steps") + table(run_tables.steps(report)))


def _value(value: str) -> Html:
    return element("dd", name(value, 400))


def _versions(manifest: Manifest) -> str:
    versions = (
        ("torch", manifest.torch_version),
        ("Python", manifest.python_version),
        ("memprof", manifest.memprof_version),
        ("CUDA", manifest.machine.cuda),
        ("driver", manifest.machine.driver),
    )
    return ", ".join(f"{what} {version}" for what, version in versions if version)


def date_of(manifest: Manifest) -> str:
    """Returns the start date of a recording, "" where unknown."""
    try:
        moment = datetime.fromtimestamp(manifest.created_us / 1e6, UTC)
    except (ValueError, OverflowError, OSError):  # timestamp out of range
        return ""
    return f"{moment:%Y-%m-%d %H:%M} UTC" if manifest.created_us > 0 else ""


def commands(report: Report, rank: Rank) -> list[Html]:
    """Returns the section with the commands that reproduce the recording and the page."""
    manifest, path = report.manifest, shlex.quote(rank.trace.path.name)
    lines = []
    if manifest.command and manifest.backend.name != PREDICTED:
        window = manifest.window
        steps = f" --skip {window.skip} --steps {window.steps}" if window.steps else ""
        plan = " --plan PLAN.toml" if manifest.plan else ""
        lines.append(f"memprof record -o {path}{steps}{plan} -- {shlex.join(manifest.command)}")
    moment = f" --at {report.step.number}:{report.shown.moment.op_id}" if report.at_moment is not None else ""
    of_rank = f" --rank {report.rank}" if report.ranks else ""
    lines += [f"memprof report {path}{of_rank}{moment} --html report.html", f"memprof dashboard {path}"]
    about = "Commands that record the job again, write this page, and open the recording in the dashboard."
    return [section("Reproduce", about, element("pre", Html("\n".join(text(shorten(line, 2_000)) for line in lines))))]
