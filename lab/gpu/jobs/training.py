"""The loop that every job here runs: plain PyTorch, and the allocator's own counts of each step printed at the end."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

#: Values of torch.cuda.memory_stats() that are printed of every step.
COUNTERS = {
    "allocated_bytes": "allocated_bytes.all.peak",
    "active_bytes": "active_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.peak",
}
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
    "adam": (torch.optim.Adam, {"lr": 1e-4}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
}
FORMS = {
    "": {},
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Repeated(Dataset):
    """A few samples over and over, handed out a batch at a time."""

    def __init__(self, length, *columns):
        self._length = length
        self._columns = columns

    def __len__(self):
        return self._length

    def __getitems__(self, indices):
        rows = torch.tensor(indices) % len(self._columns[0])
        return tuple(column[rows] for column in self._columns)


def as_it_is(batch):
    return batch


def read_arguments(description, sizes):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=sorted(sizes), default="tiny")
    parser.add_argument("--batch", type=int, help="samples in a batch, where not the size's own")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw")
    parser.add_argument("--form", choices=sorted(FORMS), default="", help="form of the optimizer's update")
    parser.add_argument("--precision", choices=["fp32", *DTYPES], default="fp32")
    parser.add_argument("--limit-bytes", type=int, default=0, help="most that may be reserved on the device")
    parser.add_argument("--history", metavar="FILE", help="write torch's own memory history here")
    parser.add_argument("--gate", metavar="FILE", help="wait until no other job that was given this file runs")
    args = parser.parse_args()
    args.settings = dict(sizes[args.size])
    if args.batch:
        args.settings["batch"] = args.batch
    return args


def hold(path):
    """Waits for a file and holds it until the process ends, so that what is timed has the device to itself."""
    if path is None:
        return None
    file = Path(path).open("a")  # noqa: SIM115 - held open until the process ends
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def prepare(args):
    torch.manual_seed(0)
    if args.device == "cuda":
        torch.cuda.init()  # before it waits for other jobs
        if args.limit_bytes:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(args.limit_bytes / total)
        if args.history:
            torch.cuda.memory._record_memory_history(context=None, max_entries=2_000_000)


def make_optimizer(args, model):
    kind, settings = OPTIMIZERS[args.optimizer]
    return kind(model.parameters(), **settings, **FORMS[args.form])


def train(args, model, columns):
    """Trains for some steps and prints a line of JSON.

    A step is defined as in memprof: from the end of an update to the end of the next, so peaks are reset as soon as
    an update has been read.
    """
    device = torch.device(args.device)
    model = model.to(device).train()
    optimizer = make_optimizer(args, model)
    scaler = torch.amp.GradScaler(args.device, init_scale=1024.0, enabled=args.precision == "fp16")
    samples = Repeated(args.settings["batch"] * args.steps, *columns)
    loader = DataLoader(samples, batch_size=args.settings["batch"], collate_fn=as_it_is)
    found = []
    start = time.perf_counter()
    for batch in loader:
        inputs, targets = (part.to(device, non_blocking=True) for part in batch)
        optimizer.zero_grad()
        with (
            torch.autocast(args.device, dtype=DTYPES[args.precision])
            if args.precision in DTYPES
            else contextlib.nullcontext()
        ):
            loss = loss_of(model, inputs, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        value = loss.item()  # waits for the device
        now = time.perf_counter()
        found.append({"us": (now - start) * 1e6, "loss": value, **counters(args.device)})
        start = time.perf_counter()
    if args.history and args.device == "cuda":
        torch.cuda.memory._dump_snapshot(args.history)
    print(json.dumps({"steps": found}), flush=True)


def counters(device):
    """Reads the peaks since the last call and sets them back; nothing where there are none."""
    if device != "cuda":
        return {}
    stats = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    return {name: stats[key] for name, key in COUNTERS.items()}


def make_words(size):
    """Draws sequences, and the words that follow each."""
    ids = torch.randint(size["vocabulary"], (size["batch"], size["length"] + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def make_images(size):
    """Draws images and their classes."""
    images = torch.randn(size["batch"], 3, size["pixels"], size["pixels"])
    return images, torch.randint(size["classes"], (size["batch"],))


def loss_of(model, inputs, targets):
    """Returns the cross-entropy of a batch, of scores by class or by position and class."""
    scores = model(inputs)
    if scores.dim() == 3:
        scores, targets = scores.flatten(0, 1), targets.flatten()
    return F.cross_entropy(scores, targets)


def run(description, sizes, make_model, make_data):
    """Reads the command line and trains: a model that is made of a size, on data of that size."""
    args = read_arguments(description, sizes)
    prepare(args)
    model = make_model(**args.settings)
    data = make_data(args.settings)
    held = hold(args.gate)
    train(args, model, data)
    return held
