"""What was alive on a GPU at one moment, as the tables of a trace: blocks of the allocator, owned and not."""

from __future__ import annotations

from pathlib import Path

from memprof.analysis.report.report import build_report
from memprof.recorder.log import RawLog
from memprof.recorder.machine import describe_process
from memprof.recorder.steps.window import Window
from memprof.trace.assemble.present import read_present
from memprof.trace.files.spool import HELD, PARAMETER
from memprof.trace.files.spool_writer import SpoolWriter
from memprof.trace.store import Trace

_BLOCKS = [(0, 4096, 1024, 1000, 0, 0), (0, 5120, 512, 512, 0, 0), (0, 5632, 2048, 2000, 0, 0), (0, 8192, 512, 8, 0, 1)]


def test_blocks_without_a_tensor_are_unknown(tmp_path: Path) -> None:
    """Categories sum to the allocator's own count; what waits for another stream is not alive."""
    log = RawLog(SpoolWriter(tmp_path / "present"))
    log.record("start", describe_process(Window(0, 1), is_late=True))
    log.record("device", {"device": "cuda:0", "kind": "cuda", "name": "some GPU", "capacity_bytes": 1 << 20})
    log.alive.extend((1, 4096, 1000))
    kind = log.intern("tensors", ("250", "float32", "cuda:0"), ["250", "float32", "cuda:0"])
    log.add_fact(4096, 1000, PARAMETER, log.intern("names", "weight"), -1, kind)
    log.add_fact(5120, 512, HELD, -1, -1, kind)
    segment = {"device": 0, "address": 4096, "total_size": 8192, "allocated_size": 3584, "active_size": 4096}
    more = {"requested_size": 3512, "stream": 0, "type": "small", "pool": [0, 0], "is_expandable": False}
    log.record("segments", {"segments": [segment | more], "blocks": _BLOCKS})
    log.sample_rss()
    log.close()
    tables = read_present(tmp_path / "present")
    report = build_report(Trace.of(tables, tmp_path, None))
    assert {part.key: part.bytes for part in report.shown.by_category.parts} == {"unknown": 2560, "parameter": 1024}
    assert (report.reserved_bytes, report.manifest.machine.capacity_bytes) == (8192, 1 << 20)
    assert not report.has_history
