"""Creates small recordings on the device for the sample traces."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from lab.gpu.reading import peaks_of
from lab.gpu.running import ROOT
from lab.gpu.runs import JOBS, MEMPROF, NoTimeError, run
from lab.gpu.section import Found, Place
from memprof.trace.files.whole_file import whole_file
from memprof.trace.store import Trace
from memprof.units import format_bytes

TITLE = "New sample traces"
HOW = (
    "Small jobs recorded on the device, each with its script and the figures that a report of it must show, as "
    "sample_traces/ has them: copy the folders there, and name them in tests/test_sample_traces.py."
)
COLUMNS = ("sample", "peak", "reserved", "in", "size")
_MOST_BYTES = 300_000
SAMPLES = {
    "gpt-cuda": ("gpt", ("--precision", "bf16")),
    "resnet-cuda": ("resnet50", ("--optimizer", "sgd")),
    "lstm-cuda": ("lstm", ("--optimizer", "adam")),
}


def measure(place: Place, found: Found) -> None:
    """Records the samples, in a folder whose name reveals nothing of this machine."""
    make = _load_make()
    small = 0
    for name, (model, arguments) in list(SAMPLES.items())[: 1 if place.is_rehearsal else None]:
        folder = place.folder(f"samples/{name}")
        try:
            figures, trace = _make(place, make, model, arguments, folder)
        except NoTimeError:
            found.note(f"No time was left for {name} and those after it.")
            break
        size = (folder / "run.memprof").stat().st_size
        small += size <= _MOST_BYTES
        peak, reserved = figures["peak"], peaks_of(trace.steady_step(), place.device_name).reserved_bytes
        found.add(
            (
                name,
                f"{peak['allocated_bytes']:,}",
                "" if reserved is None else f"{reserved:,}",
                f"{peak['phase']}, {peak['op']}",
                format_bytes(size),
            ),
            sample=name,
            size_bytes=size,
            reserved_bytes=reserved,
            **figures,
        )
    count = len(found.section.rows)
    found.bar(f"each at most {_MOST_BYTES // 1000} kB: {small} of {count}", 0 < count == small)


def _make(
    place: Place, make: ModuleType, model: str, arguments: tuple[str, ...], folder: Path
) -> tuple[dict[str, object], Trace]:
    neutral = Path(tempfile.gettempdir()) / "memprof-samples" / folder.name
    shutil.rmtree(neutral, ignore_errors=True)
    neutral.mkdir(parents=True)
    try:
        shutil.copy(JOBS / f"{model}.py", neutral / "train.py")
        shutil.copy(JOBS / "training.py", neutral)
        words = ["train.py", "--device", place.device, "--size", "tiny", *arguments]
        # Started from there, so that the recorded paths are the sample's own.
        options = {"has_memprof": True, "folder": neutral}
        run(place, [*MEMPROF, "record", "-f", "-o", "run.memprof", *words], **options)
        report, _ = run(place, [*MEMPROF, "report", "--json", "run.memprof"], **options)
        for name in ("run.memprof", "train.py", "training.py"):
            shutil.copy(neutral / name, folder / name)
    finally:
        shutil.rmtree(neutral)
    figures = make.expected(json.loads(report), folder / "run.memprof")
    texts = {"expected.json": json.dumps(figures, indent=2), "command.txt": " ".join(["memprof record", *words])}
    for name, text in texts.items():
        with whole_file(folder / name) as file:
            file.write(f"{text}\n".encode())
    return figures, Trace.open(folder / "run.memprof")


def _load_make() -> ModuleType:
    """Loads sample_traces/make.py, which knows what is expected of a sample."""
    spec = importlib.util.spec_from_file_location("make_samples", ROOT / "sample_traces" / "make.py")
    assert spec is not None  # the file is in the repository
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
