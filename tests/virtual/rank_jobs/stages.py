"""A pipeline of as many stages as ranks, or twice as many: ``stages.py gpipe|1f1b|interleaved|zero_bubble``."""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.distributed as dist
from small_gpt import GPT, STEPS, begin, draw, loss_of
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

KIND = sys.argv[1]
device = begin()
rank, ranks = dist.get_rank(), dist.get_world_size()
MICRO_BATCHES = max(8, ranks)  # 1F1B takes no fewer than it has stages
count = ranks * (2 if KIND in ("interleaved", "zero_bubble") else 1)
whole = GPT(layers=count)
places = range(rank, count, ranks)
parts = []
for place in places:
    first, last = [whole.embedding] if place == 0 else [], [whole.norm, whole.head] if place == count - 1 else []
    parts.append(nn.Sequential(*first, whole.layers[place], *last).to(device))
stages = [PipelineStage(part, place, count, device) for part, place in zip(parts, places, strict=True)]
schedule = {
    "gpipe": partial(ScheduleGPipe, stages[0]),
    "1f1b": partial(Schedule1F1B, stages[0]),
    "interleaved": partial(ScheduleInterleaved1F1B, stages),
    "zero_bubble": partial(ScheduleInterleavedZeroBubble, stages),
}[KIND](MICRO_BATCHES, loss_fn=loss_of)
optimizer = torch.optim.AdamW([one for part in parts for one in part.parameters()])
for _ in range(STEPS):
    ids = draw(device, batch=2 * MICRO_BATCHES)
    last_words = {"target": ids} if rank == ranks - 1 else {}
    schedule.step(*([ids] if rank == 0 else []), **last_words)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
