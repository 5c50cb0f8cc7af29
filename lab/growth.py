"""False alarms of growth, and leaks by any rhythm: ``python -m lab.growth [JOB]...`` records small jobs and counts.

Each job is a function that sets up a loop and returns its step. The first table holds sound jobs: no growth may be
stated. The second holds leaks: growth is stated with its holder and the line that is marked, or the command is named.
"""

from __future__ import annotations

import collections
import functools
import gc
import linecache
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import memprof
from memprof.analysis.leaks.leaks import describe_leaks, find_leaks, growth_notice
from memprof.trace.store import Trace

Step = Callable[[int], None]
SOUND: dict[str, Callable[[], Step]] = {}
LEAKS: dict[str, Callable[[], Step]] = {}
_SKIP, _STEPS, _MORE = 2, 12, 6


def _into(table: dict[str, Callable[[], Step]]) -> Callable[[Callable[[], Step]], Callable[[], Step]]:
    def add(job: Callable[[], Step]) -> Callable[[], Step]:
        table[job.__name__] = job
        return job

    return add


sound, leak = _into(SOUND), _into(LEAKS)


def net(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 32) -> torch.Tensor:
    loss = model(torch.randn(rows, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def plain(
    make: Callable[..., torch.optim.Optimizer], **settings: object
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    return model, make(model.parameters(), **settings)


# -- optimizers -------------------------------------------------------------------------------------------------------


def _with_optimizer(name: str, make: Callable[..., torch.optim.Optimizer], **settings: object) -> None:
    def job() -> Step:
        model, optimizer = plain(make, **settings)
        return lambda _: train(model, optimizer) and None

    SOUND[name] = job


_with_optimizer("adamw_first_step", torch.optim.AdamW)
_with_optimizer("sgd_momentum", torch.optim.SGD, lr=1e-2, momentum=0.9)
_with_optimizer("adagrad", torch.optim.Adagrad)
_with_optimizer("amsgrad", torch.optim.Adam, amsgrad=True)
_with_optimizer("rmsprop_centered", torch.optim.RMSprop, centered=True, momentum=0.9)
_with_optimizer("foreach", torch.optim.AdamW, foreach=True)
_with_optimizer("averaged_sgd", torch.optim.ASGD)


@sound
def schedule_of_rates() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)

    def step(_: int) -> None:
        train(model, optimizer)
        schedule.step()

    return step


@sound
def state_from_step_four() -> Step:
    model, head = net(), nn.Linear(64, 64)
    head.requires_grad_(False)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])

    def step(i: int) -> None:
        head.requires_grad_(i >= 4)
        train(nn.Sequential(model, head), optimizer)

    return step


@sound
def scaler_that_skips() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(i: int) -> None:
        loss = model(torch.randn(32, 64)).square().mean() * (float("inf") if i % 5 == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@sound
def accumulation() -> Step:
    model, optimizer = plain(torch.optim.AdamW)

    def step(_: int) -> None:
        for _ in range(3):
            model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@sound
def two_optimizers() -> Step:
    made, judged = net(), net()
    of_made, of_judged = torch.optim.Adam(made.parameters()), torch.optim.Adam(judged.parameters())

    def step(_: int) -> None:
        fake = made(torch.randn(32, 64))
        (judged(fake.detach()).mean() - judged(torch.randn(32, 64)).mean()).backward()
        of_judged.step()
        of_judged.zero_grad()
        (-judged(fake).mean()).backward()
        of_made.step()
        of_made.zero_grad()

    return step


# -- averages, states and buffers -------------------------------------------------------------------------------------


@sound
def moving_average() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    average: list[torch.Tensor] = []

    def step(_: int) -> None:
        train(model, optimizer)
        if not average:
            average.extend(one.detach().clone() for one in model.parameters())
        torch._foreach_lerp_(average, [one.detach() for one in model.parameters()], 0.01)

    return step


@sound
def average_made_anew() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    kept = {"average": {name: one.detach().clone() for name, one in model.named_parameters()}}

    def step(_: int) -> None:
        train(model, optimizer)
        old = kept["average"]
        kept["average"] = {name: old[name] * 0.99 + one.detach() * 0.01 for name, one in model.named_parameters()}

    return step


@sound
def best_checkpoint() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    best: dict[str, object] = {}

    def step(i: int) -> None:
        loss = train(model, optimizer)
        if i % 3 == 0:
            best.update(loss=loss.item(), state={name: one.clone() for name, one in model.state_dict().items()})

    return step


@sound
def stochastic_weight_averaging() -> Step:
    model, optimizer = plain(torch.optim.SGD, lr=1e-2)
    kept: list[torch.optim.swa_utils.AveragedModel] = []

    def step(i: int) -> None:
        train(model, optimizer)
        if i == 5:
            kept.append(torch.optim.swa_utils.AveragedModel(model))
        if kept:
            kept[0].update_parameters(model)

    return step


@sound
def running_statistics() -> Step:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters())
    mean = torch.zeros(64)

    def step(_: int) -> None:
        loss = train(model, optimizer)
        mean.mul_(0.9).add_(loss.detach(), alpha=0.1)

    return step


@sound
def recurrent_states() -> Step:
    cell, kept = nn.LSTM(64, 64), {"state": (torch.zeros(1, 32, 64), torch.zeros(1, 32, 64))}
    optimizer = torch.optim.Adam(cell.parameters())

    def step(_: int) -> None:
        out, state = cell(torch.randn(8, 32, 64), kept["state"])
        kept["state"] = (state[0].detach(), state[1].detach())
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@sound
def cache_of_keys() -> Step:
    model, optimizer = plain(torch.optim.AdamW)

    def step(_: int) -> None:
        train(model, optimizer)
        with torch.no_grad():
            cache: list[torch.Tensor] = []
            for _ in range(8):
                cache.append(model(torch.randn(4, 64)))
                torch.cat(cache)

    return step


@sound
def memory_bank() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    bank, place = torch.zeros(256, 64), [0]

    def step(_: int) -> None:
        train(model, optimizer)
        with torch.no_grad():
            bank[place[0] : place[0] + 32] = model(torch.randn(32, 64))
        place[0] = (place[0] + 32) % 256

    return step


@sound
def queue_of_negatives() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    kept = {"queue": torch.zeros(128, 64)}

    def step(_: int) -> None:
        train(model, optimizer)
        with torch.no_grad():
            kept["queue"] = torch.cat((kept["queue"], model(torch.randn(32, 64))))[-128:].clone()

    return step


# -- caches and logs that fill up -------------------------------------------------------------------------------------


@sound
def replay_buffer() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    buffer: collections.deque[torch.Tensor] = collections.deque(maxlen=4)

    def step(_: int) -> None:
        buffer.append(torch.randn(64, 64))
        train(model, optimizer)

    return step


@sound
def replay_that_is_full_late() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    buffer: collections.deque[torch.Tensor] = collections.deque(maxlen=6)

    def step(_: int) -> None:
        train(model, optimizer)
        buffer.append(model(torch.randn(64, 64)).detach())

    return step


@sound
def cache_by_length() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    masks: dict[int, torch.Tensor] = {}

    def step(i: int) -> None:
        size = 16 + i * 7 % 4
        if size not in masks:
            masks[size] = torch.ones(size, 64)
        (model(torch.randn(size, 64)) * masks[size]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@sound
def least_recently_used() -> Step:
    model, optimizer = plain(torch.optim.AdamW)

    @functools.lru_cache(maxsize=3)
    def positions(size: int) -> torch.Tensor:
        return torch.randn(size, 64)

    def step(i: int) -> None:
        positions(64 + i % 5)
        train(model, optimizer)

    return step


@sound
def buffer_of_the_longest() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    kept = {"longest": torch.zeros(8, 64)}

    def step(i: int) -> None:
        size = 8 + min(i, 3) * 8
        if len(kept["longest"]) < size:
            kept["longest"] = torch.zeros(size, 64)
        train(model, optimizer, size)

    return step


@sound
def list_of_floats() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    losses: list[float] = []

    def step(_: int) -> None:
        losses.append(train(model, optimizer).item())

    return step


@sound
def list_of_detached_losses() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    losses: list[torch.Tensor] = []

    def step(_: int) -> None:
        losses.append(train(model, optimizer).detach())  # four bytes each

    return step


@sound
def log_that_is_flushed() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    log: list[torch.Tensor] = []

    def step(i: int) -> None:
        train(model, optimizer)
        log.append(model(torch.randn(32, 64)).detach())
        if i % 4 == 3:
            log.clear()

    return step


@sound
def metrics_of_an_epoch() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    confusion = torch.zeros(64, 64)

    def step(i: int) -> None:
        train(model, optimizer)
        with torch.no_grad():
            confusion.add_(model(torch.randn(64, 64)))
        if i % 6 == 5:
            confusion.zero_()

    return step


@sound
def gradient_history() -> Step:
    model, optimizer = plain(torch.optim.LBFGS, history_size=3, max_iter=1)

    def step(_: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(32, 64)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return step


# -- data and sizes ---------------------------------------------------------------------------------------------------


@sound
def prefetching() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    ahead: collections.deque[torch.Tensor] = collections.deque(torch.randn(32, 64) for _ in range(3))

    def step(_: int) -> None:
        ahead.append(torch.randn(32, 64))
        model(ahead.popleft()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@sound
def data_loader() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    loader = DataLoader(list(torch.randn(64, 64)), batch_size=8, shuffle=True)
    kept = {"batches": iter(loader)}

    def step(_: int) -> None:
        batch = next(kept["batches"], None)
        if batch is None:
            kept["batches"] = iter(loader)
            batch = next(kept["batches"])
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@sound
def growing_batches() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    return lambda i: train(model, optimizer, 8 + min(i, 10) * 4) and None


@sound
def random_lengths() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    return lambda _: train(model, optimizer, int(torch.randint(8, 64, ()))) and None


@sound
def batches_of_a_range() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    kept: dict[str, torch.Tensor] = {}

    def step(i: int) -> None:
        kept["batch"] = torch.randn(16 + i % 3 * 16, 64)
        train(model, optimizer)

    return step


# -- other loops ------------------------------------------------------------------------------------------------------


@sound
def evaluation_that_returns() -> Step:
    model, optimizer = plain(torch.optim.AdamW)

    def step(i: int) -> None:
        train(model, optimizer)
        if i % 4 == 3:
            with torch.no_grad():
                torch.cat([model(torch.randn(32, 64)) for _ in range(4)]).mean().item()

    return step


@sound
def policy_gradient() -> Step:
    model, optimizer = plain(torch.optim.AdamW)

    def step(_: int) -> None:
        with torch.no_grad():
            rollout = [model(torch.randn(8, 64)) for _ in range(4)]
        for states in rollout:
            model(states).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@sound
def target_network() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    target = net()

    def step(i: int) -> None:
        train(model, optimizer)
        if i % 5 == 0:
            target.load_state_dict(model.state_dict())

    return step


@sound
def reference_model_in_step_three() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    kept: list[nn.Module] = []

    def step(i: int) -> None:
        train(model, optimizer)
        if i == 3:
            kept.append(net().requires_grad_(False))

    return step


@sound
def a_cycle_that_is_collected() -> Step:
    model, optimizer = plain(torch.optim.AdamW)

    def step(i: int) -> None:
        train(model, optimizer)
        cycle: list[object] = [torch.randn(16, 64)]
        cycle.append(cycle)
        if i % 2:
            gc.collect()

    return step


@sound
def pruning_masks() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    masks: dict[str, torch.Tensor] = {}

    def step(i: int) -> None:
        train(model, optimizer)
        if i % 3 == 0:
            masks.update((name, (one.detach().abs() > 0.01).float()) for name, one in model.named_parameters())

    return step


# -- leaks ------------------------------------------------------------------------------------------------------------


def _every(name: str, steps: int) -> None:
    def job() -> Step:
        model, optimizer = plain(torch.optim.AdamW)
        history: list[torch.Tensor] = []

        def step(i: int) -> None:
            train(model, optimizer)
            if i % steps == 0:
                history.append(model(torch.randn(128, 64)).detach())  # leak

        return step

    LEAKS[name] = job


for _name, _rhythm in (("each_step", 1), ("second", 2), ("third", 3), ("fourth", 4), ("fifth", 5), ("seventh", 7)):
    _every(_name, _rhythm)


@leak
def once_an_epoch() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    best: list[torch.Tensor] = []

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([model(torch.randn(64, 64)) for _ in range(4)])  # leak

    def step(i: int) -> None:
        train(model, optimizer)
        if i % 6 == 5:
            best.append(evaluate())

    return step


@leak
def sawtooth() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    window: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []

    def step(i: int) -> None:
        train(model, optimizer)
        window.append(torch.randn(256, 64))
        if i % 4 == 3:
            window.clear()
        kept.append(torch.randn(32, 64))  # leak

    return step


@leak
def one_percent() -> Step:
    model, kept = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)), []
    optimizer = torch.optim.AdamW(model.parameters())

    def step(_: int) -> None:
        train(model, optimizer)
        kept.append(torch.randn(32, 64))  # leak

    return step


@leak
def graph_of_losses() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    total: list[torch.Tensor] = [torch.zeros(())]

    def step(_: int) -> None:
        train(model, optimizer)
        total[0] = total[0] + model(torch.randn(128, 64)).square().mean()  # leak

    return step


@leak
def history_joined_anew() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    kept = {"all": torch.zeros(0, 64)}

    def step(_: int) -> None:
        train(model, optimizer)
        kept["all"] = torch.cat((kept["all"], torch.randn(64, 64)))  # leak

    return step


@leak
def cache_by_identity() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    cache: dict[int, torch.Tensor] = {}

    def step(i: int) -> None:
        train(model, optimizer)
        cache[i] = torch.randn(64, 64)  # leak

    return step


@leak
def irregular() -> Step:
    model, optimizer = plain(torch.optim.AdamW)
    kept: list[torch.Tensor] = []

    def step(i: int) -> None:
        train(model, optimizer)
        if i % 5 in (0, 2, 3):
            kept.append(torch.randn(64, 64))  # leak

    return step


def judge(name: str, job: Callable[[], Step], folder: Path, *, leaks: bool) -> str:
    """Records a job; returns what is wrong with the answer, "" for nothing."""
    torch.manual_seed(0)
    path = folder / f"{name}.memprof"
    step = job()
    with memprof.record(str(path), skip=_SKIP, steps=_STEPS):
        for number in range(_SKIP + _STEPS + _MORE):
            step(number)
    trace = Trace.open(path)
    report = find_leaks(trace)
    rate, said = report.growth.bytes_per_step, describe_leaks(report)
    if not leaks:
        return said if rate and growth_notice(trace) else ""
    if rate is None and "memprof record" in said:
        return ""
    if not rate or not report.leaks:
        return said
    first = report.leaks[0]
    file, _, line = first.line.rpartition(":")
    is_marked = file.endswith("growth.py") and "# leak" in linecache.getline(__file__, int(line))
    return "" if is_marked and first.held_by is not None else said


def main(words: list[str]) -> int:
    """Prints a row for each wrong answer, then the counts; returns how many are wrong."""
    torch.set_num_threads(1)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for title, table in (("sound", SOUND), ("leaks", LEAKS)):
            chosen = {name: job for name, job in table.items() if not words or name in words}
            found = {}
            for name, job in chosen.items():
                try:
                    found[name] = judge(name, job, Path(folder), leaks=table is LEAKS)
                except Exception:  # noqa: BLE001 - the next row follows
                    found[name] = traceback.format_exc()
                gc.collect()
                if found[name]:
                    print(f"{title} | {name} | {found[name]}", flush=True)
            bad = sum(map(bool, found.values()))
            print(f"{title}: {len(found) - bad} of {len(found)} right", flush=True)
            wrong += bad
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
