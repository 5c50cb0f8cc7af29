"""Profiles its own training in one of many ways, and prints the result."""

import sys
import threading
import warnings

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler
from training import make, step

warnings.simplefilter("ignore")
CPU = [ProfilerActivity.CPU]
STEPS = 9


def show(profiler):
    """Prints what ran how often, without Python's own functions: memprof's are among those that with_stack shows."""
    averages = profiler.key_averages()
    print(sorted((event.key, event.count) for event in averages if not is_left_out(event.key)), flush=True)


def is_left_out(key):
    return key == "[memory]" or key.startswith("<") or ".py(" in key


def loop(profiler=None, steps=STEPS):
    for _ in range(steps):
        print(step(model, optimizer).hex())
        if profiler is not None:
            profiler.step()


def scheduled(wait, warmup, active, repeat, *options):
    settings = {name: True for name in options}
    plan = schedule(wait=int(wait), warmup=int(warmup), active=int(active), repeat=int(repeat))
    with profile(activities=CPU, schedule=plan, on_trace_ready=show, **settings) as profiler:
        loop(profiler)


def late(wait, warmup):
    """Begins after three steps."""
    loop(steps=3)
    scheduled(wait, warmup, 1, 1)


def whole():
    with profile(activities=CPU) as profiler:
        loop()
    show(profiler)


def to_files():
    plan = schedule(wait=1, warmup=1, active=1)
    with profile(activities=CPU, schedule=plan, on_trace_ready=tensorboard_trace_handler("traces", "me")) as profiler:
        loop(profiler)
    import os

    print(len([name for name in os.listdir("traces") if name.endswith(".json")]))
    for name in os.listdir("traces"):
        os.remove(os.path.join("traces", name))
    os.rmdir("traces")


def autograd():
    for _ in range(3):
        loop(steps=1)
        with torch.autograd.profiler.profile(use_kineto=True) as profiler:
            loop(steps=1)
        show(profiler)


def marks():
    for number in range(STEPS):
        with record_function(f"step {number}"):
            loop(steps=1)
    with torch.autograd.profiler.emit_itt():
        loop(steps=1)


def low_level():
    from torch.profiler.profiler import _KinetoProfile

    profiler = _KinetoProfile(activities=CPU)
    loop(steps=1)
    profiler.prepare_trace()
    loop(steps=2)
    profiler.start_trace()
    loop(steps=1)
    profiler.stop_trace()
    show(profiler)
    loop(steps=4)


def observed():
    from torch.profiler import ExecutionTraceObserver

    observer = ExecutionTraceObserver().register_callback("observed.json")
    loop(steps=2)
    with profile(activities=CPU, execution_trace_observer=observer) as profiler:
        loop(steps=1)
    show(profiler)
    loop(steps=3)
    observer.unregister_callback()
    import json
    import os

    with open("observed.json") as file:
        print(sorted(node["name"] for node in json.load(file)["nodes"] if node["name"].startswith("aten::")))
    os.remove("observed.json")


def two_in_turn():
    for wait in (0, 1):
        plan = schedule(wait=wait, warmup=1, active=1, repeat=1)
        with profile(activities=CPU, schedule=plan, on_trace_ready=show) as profiler:
            loop(profiler, steps=4)
    loop(steps=2)


def in_thread():
    """Profiles in a thread of its own, again and again while the training goes on."""
    scheduled(0, 0, 1, 1)  # else torch complains of the thread that sets the profiler up
    found, over = [], threading.Event()

    def work():
        while not over.is_set():
            with profile(activities=CPU) as profiler:
                torch.ones(3) + 1
            found.append(sorted((event.key, event.count) for event in profiler.key_averages()))

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(STEPS):
        seen = len(found)
        print(step(model, optimizer).hex())
        while len(found) < seen + 2 and thread.is_alive():
            over.wait(0.001)
    over.set()
    thread.join()
    print(len(found) >= 2 * STEPS, sorted({str(averages) for averages in found}))
    scheduled(0, 1, 1, 1)  # the training's thread still can


def in_backward():
    def work(grad):
        with profile(activities=CPU) as profiler:
            torch.ones(3) + 1
        show(profiler)

    for _ in range(5):
        batch = torch.randn(8, 16, requires_grad=True)
        batch.register_hook(work)
        print(step(model, optimizer, batch).hex())
    scheduled(0, 1, 1, 1)


def in_forward():
    def work(*_):
        with profile(activities=CPU) as profiler:
            torch.ones(3) + 1
        show(profiler)

    model.blocks[0].register_forward_hook(work)
    loop(steps=6)


def fails(where):
    """An error inside the profile, caught; the same profiler is used wrongly, which is an error, too."""
    for number in range(6):
        try:
            with profile(activities=CPU, schedule=schedule(wait=0, warmup=1, active=2)) as profiler:
                loop(profiler, steps=1 if where == "warmup" else 2)
                if number % 2:
                    raise ValueError("inside")
        except ValueError as error:
            print(error)
    try:
        with profile(activities=CPU), profile(activities=CPU):
            print("not reached")
    except RuntimeError as error:
        import traceback

        print(error, [frame.filename.rsplit("/", 1)[-1] for frame in traceback.extract_tb(error.__traceback__)])
    loop(steps=5)


def never_ended(kind):
    plan = schedule(wait=0, warmup=1, active=50)
    profiler = profile(activities=CPU, schedule=plan)
    profiler.start()
    loop(profiler, steps=0 if kind == "warmup" else 2)
    loop(steps=5)


def forgotten():
    """Its first session is dropped in the middle of a step, the next begins there."""
    loop(steps=2)
    loss = model(torch.randn(8, 16)).square().mean()
    profiler = profile(activities=CPU)
    profiler.start()
    optimizer.zero_grad()
    loss.backward()
    profiler.stop()
    show(profiler)
    optimizer.step()
    loop(steps=5)


model, optimizer = make()
globals()[sys.argv[1]](*sys.argv[2:])
