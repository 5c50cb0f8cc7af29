"""Trains the sample GPT and profiles one step with torch.profiler; writes its gzipped Chrome trace."""

from __future__ import annotations

import sys

from observed import gpt
from torch.profiler import ProfilerActivity, profile


def main() -> None:
    _, _, train = gpt()
    for _ in range(3):
        train()
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    ) as profiler:
        train()
    profiler.export_chrome_trace(sys.argv[1])


if __name__ == "__main__":
    main()
