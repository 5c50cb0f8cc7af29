"""What a program can see of the interpreter it runs in, one function a case."""

import cProfile
import collections
import contextvars
import faulthandler
import gc
import inspect
import linecache
import logging
import os
import pickle
import pstats
import sys
import threading
import traceback
import tracemalloc
import warnings
import weakref

import in_turn


class Point:
    def __init__(self, x):
        self.x = x


def is_mine(path):
    import training

    return path in (__file__, training.__file__)  # other packages have files of these names


def traces():
    from training import train

    events = collections.Counter()

    def trace(frame, event, argument):
        if not is_mine(frame.f_code.co_filename):
            return None
        events[frame.f_code.co_name, event] += 1
        return trace

    sys.settrace(trace)
    train()
    print(sys.gettrace() is trace)
    sys.settrace(None)
    print(sorted(events.items()))


def profiles():
    from training import train

    calls = collections.Counter()

    def profile(frame, event, argument):
        if event == "call" and is_mine(frame.f_code.co_filename):
            calls[frame.f_code.co_name] += 1

    sys.setprofile(profile)
    train()
    print(sys.getprofile() is profile)
    sys.setprofile(None)
    print(sorted(calls.items()))


def traces_threads():
    from training import train

    seen = collections.Counter()
    threading.settrace(lambda frame, event, argument: seen.update([frame.f_code.co_name] if is_mine(frame.f_code.co_filename) else []))
    worker = threading.Thread(target=train)
    worker.start()
    worker.join()
    print(sorted(seen.items()))


def c_profile():
    from training import train

    profiler = cProfile.Profile()
    profiler.runcall(train)
    stats = pstats.Stats(profiler).stats
    print(sorted((name, count) for (path, _, name), (count, *_) in stats.items() if is_mine(path)))


def trace_malloc():
    from training import train

    tracemalloc.start(5)
    train()
    kept = [bytes(1000) for _ in range(100)]
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, __file__)])
    print(tracemalloc.get_traceback_limit(), [stat.count >= 100 for stat in snapshot.statistics("lineno") if stat.size > 50_000])
    print(len(kept), tracemalloc.get_object_traceback(kept[0])[-1].lineno > 0)


def dump_later():
    from training import train

    with open("dump.txt", "w") as file:
        faulthandler.dump_traceback_later(3600, file=file)
        train()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback(file=file, all_threads=True)


def collects():
    from training import train

    phases = []
    gc.callbacks.append(lambda phase, info: phases.append(phase) if info["generation"] == 2 else None)
    train()
    phases.clear()
    gc.collect()
    print(phases, gc.get_threshold(), gc.isenabled(), gc.get_debug(), gc.garbage, gc.get_freeze_count())
    gc.freeze()
    gc.unfreeze()


def without_collector():
    from training import make, step

    gc.disable()
    gc.set_threshold(1, 1, 1)
    model, optimizer = make()
    references = []
    for number in range(5):
        print(number, step(model, optimizer).hex(), gc.isenabled(), gc.get_threshold())
        references.append(weakref.ref(model.head.weight.grad))
        optimizer.zero_grad(set_to_none=True)
    print([reference() is None for reference in references])


def all_collected():
    """Every allocation may collect: finalizers run in the middle of anything."""
    from training import train

    gc.set_threshold(1, 1, 1)
    train()


def objects():
    import torch
    from training import make, step

    model, optimizer = make()
    for number in range(5):
        step(model, optimizer)
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
        modules = [each for each in gc.get_objects() if isinstance(each, torch.nn.Module)]
        optimizers = [each for each in gc.get_objects() if isinstance(each, torch.optim.Optimizer)]
        print(number, len(tensors), len(modules), len(optimizers))
    print(len(gc.get_referrers(model.head.weight)), len(gc.get_referents(model.head)))


def leak_check():
    from training import make, step

    def run():
        model, optimizer = make()
        step(model, optimizer)
        return weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.head.weight)

    gone = [run() for _ in range(6)]
    gc.collect()
    print([[reference() is None for reference in each] for each in gone])


def stacks():
    import torch
    from training import Model, make, step

    class Deep(Model):
        def forward(self, x):
            if self.training:
                print([frame.function for frame in inspect.stack()][:4])
                print([os.path.basename(frame.filename) for frame in traceback.extract_stack()])
            return super().forward(x)

    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        step(model, optimizer)
    print(sys._getframe().f_code.co_name, len(sys._current_frames()), len(make.__code__.co_names))


def warning_errors():
    from training import train

    warnings.simplefilter("error")
    train()
    print(len(warnings.filters) > 0)


def warning_catch():
    from training import train

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
        warnings.warn("own", stacklevel=1)
    print([(str(each.message), each.category.__name__, os.path.basename(each.filename)) for each in caught])


def main_module():
    import __main__

    print(sorted(vars(__main__))[:20], __main__.__spec__, __name__, __file__, __main__.__builtins__.__name__)
    print(inspect.getsource(is_mine), linecache.getline(__file__, 1), inspect.getfile(Point).endswith("looking.py"))
    print(sys.argv, sys.orig_argv[1:], os.path.basename(sys.executable))


def pickles_main():
    print(pickle.loads(pickle.dumps(Point(3))).x, pickle.dumps(Point)[:40])


def pickles_in_training():
    import copy

    import torch
    from training import make, step

    model, optimizer = make()
    for number in range(5):
        print(number, step(model, optimizer).hex())
        twin, other = copy.deepcopy((model, optimizer))
        print(step(twin, other).hex())
        again = pickle.loads(pickle.dumps(model))
        print(again(torch.ones(1, 16)).sum().item().hex(), list(vars(again)), len(pickle.dumps(optimizer)))
        torch.save({"model": model, "optimizer": optimizer.state_dict()}, "all.pt")
        loaded = torch.load("all.pt", weights_only=False)
        optimizer.load_state_dict(loaded["optimizer"])
        model.load_state_dict(loaded["model"].state_dict())


def audits():
    """Forbids what it does not do itself, as a sandbox would."""
    from training import make, step

    model, optimizer = make()
    step(model, optimizer)
    forbidden = []

    def audit(event, arguments):
        if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax"):
            forbidden.append(arguments[0])
            raise PermissionError("no writing here")

    sys.addaudithook(audit)
    for number in range(5):
        print(number, step(model, optimizer).hex())


def logs():
    from training import train

    logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(name)s %(message)s")
    train()
    print(sorted(name for name in logging.root.manager.loggerDict if not name.startswith("torch"))[:3])
    print(logging.root.handlers, logging.getLevelName(logging.root.level))


def context():
    from training import make, step

    number = contextvars.ContextVar("number", default=-1)

    def run(value):
        number.set(value)
        model, optimizer = make()
        return [(number.get(), step(model, optimizer).hex()) for _ in range(4)]

    print(contextvars.copy_context().run(run, 3), number.get(), len(contextvars.copy_context()))


def threads_seen():
    from training import train

    train(before=lambda _: print([each.name for each in threading.enumerate()], threading.active_count()))
    print(len(os.listdir("/proc/self/task")) >= 1)


def descriptors():
    from training import train

    open("first.txt", "w").close()
    before = open("second.txt", "w").fileno()
    train(before=lambda _: print(open("second.txt").fileno() == before))


def random_streams():
    import random

    import numpy
    import torch
    from training import train

    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(3)
    train(before=lambda _: print(random.random(), numpy.random.rand(), torch.rand(1).item()))
    print(hash(str(random.getstate())), hash(torch.get_rng_state().numpy().tobytes()), torch.initial_seed())
    print(os.urandom(4) != os.urandom(4), hash("text"))


def seeds_in_step():
    import torch
    from training import make, step

    model, optimizer = make()
    model.blocks[1].register_forward_pre_hook(lambda *_: torch.manual_seed(7) and None)
    for number in range(5):
        print(number, step(model, optimizer).hex(), torch.rand(1).item())
        with torch.random.fork_rng():
            torch.manual_seed(number)
            print(torch.randn(1).item())


if __name__ == "__main__":
    in_turn.call(globals())
