"""Runs a script under torch's MemTracker and prints the peak it measured, as JSON."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    output, sys.stdout = sys.stdout, Path(os.devnull).open("w")  # noqa: SIM115 - lives as long as the process
    tracker = MemTracker()
    # It follows one iteration of the modules, and is to be told where the next begins.
    register_optimizer_step_post_hook(lambda *_: tracker.reset_mod_stats())
    with tracker:
        runpy.run_path(script, run_name="__main__")
    peaks = tracker.get_tracker_snapshot("peak")
    print(json.dumps({str(device): int(parts["Total"]) for device, parts in peaks.items()}), file=output)


if __name__ == "__main__":
    main()
