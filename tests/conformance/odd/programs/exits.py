"""How a program ends, one function a case."""

import atexit
import os
import signal
import sys
import threading
import time
import weakref


class Status(SystemExit):
    @property
    def code(self):
        return 9

    @code.setter
    def code(self, value):
        pass


class Noisy:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        print("gone", self.name)


class Failing:
    def __del__(self):
        raise ValueError("in a finalizer")


def exits_large():
    sys.exit(2**33 + 5)


def exits_with_object():
    sys.exit(Ellipsis)


def exits_with_pair():
    raise SystemExit(3, "more")


def exits_with_subclass():
    raise Status("text")


def exits_in_thread():
    worker = threading.Thread(target=sys.exit, args=(7,))
    worker.start()
    worker.join()
    print("main goes on")


def fails_in_thread():
    def fail():
        raise ValueError("in a thread")

    worker = threading.Thread(target=fail, name="worker")
    worker.start()
    worker.join()


def own_thread_hook():
    threading.excepthook = lambda arguments: print(arguments.exc_type.__name__, arguments.thread.name)
    fails_in_thread()


def leaves_at_once():
    atexit.register(print, "never")
    sys.stdout.write("never flushed")
    os._exit(5)


def leaves_in_thread():
    worker = threading.Thread(target=os._exit, args=(6,))
    worker.start()
    time.sleep(60)


def at_exit():
    def nested():
        print("second")
        atexit.register(print, "registered at exit")

    def fails():
        raise ValueError("at exit")

    def leaves():
        raise SystemExit(4)

    atexit.register(print, "last")
    atexit.register(nested)
    atexit.register(fails)
    atexit.register(leaves)
    atexit.register(atexit.unregister, print)
    weakref.finalize(sys.modules["__main__"], print, "finalized")
    print(atexit._ncallbacks() < 10)


def finalizers():
    global kept, cycle
    kept = Noisy("global")
    cycle = [Noisy("cycle")]
    cycle.append(cycle)
    Failing()
    sys.kept = Noisy("on sys")


def own_unraisable_hook():
    sys.unraisablehook = lambda problem: print("unraisable", problem.exc_value, problem.err_msg)
    Failing()


def own_except_hook():
    def hook(kind, error, trace):
        print("hook", kind.__name__, error, trace.tb_frame.f_code.co_name)

    sys.excepthook = hook
    raise ValueError("caught by nobody")


def except_hook_fails():
    def hook(kind, error, trace):
        raise KeyError("in the hook")

    sys.excepthook = hook
    raise ValueError("caught by nobody")


def except_hook_exits():
    sys.excepthook = lambda *_: sys.exit(17)
    raise ValueError("caught by nobody")


def daemon_alive():
    def forever():
        while True:
            time.sleep(0.001)

    for _ in range(3):
        threading.Thread(target=forever, daemon=True).start()
    print("ends")


def thread_outlives_main():
    def late():
        time.sleep(0.2)
        print("late", threading.main_thread().is_alive())

    threading.Thread(target=late).start()
    print("main ends")
    sys.exit(3)


def aborts():
    print("before", flush=True)
    os.abort()


def recursion():
    def deeper():
        deeper()

    deeper()


def memory_error():
    bytearray(1 << 62)


def keyboard():
    raise KeyboardInterrupt


def notes():
    error = ValueError("noted")
    error.add_note("one\ntwo")
    raise error from KeyError("cause")


def unprintable():
    class Bad(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    raise Bad


def surrogate():
    raise ValueError("\udcff \N{SNOWMAN}")


def generator_left_open():
    def numbers():
        try:
            yield 1
        finally:
            print("closed")

    global left
    left = numbers()
    print(next(left))


def exits_in_hook():
    from training import make, step

    model, optimizer = make()
    model.head.weight.register_hook(lambda gradient: sys.exit(21) if number == 2 else None)
    for number in range(5):
        print(number, step(model, optimizer).hex())


def leaves_in_step():
    from training import make, step

    model, optimizer = make()
    model.head.register_forward_hook(lambda *_: os._exit(22) if number == 2 else None)
    for number in range(5):
        print(number, step(model, optimizer).hex(), flush=True)


def aborts_in_step():
    from training import make, step

    model, optimizer = make()
    model.head.register_forward_hook(lambda *_: os.abort() if number == 2 else None)
    for number in range(5):
        print(number, step(model, optimizer).hex(), flush=True)


def recursion_in_forward():
    from training import make, step

    model, optimizer = make()
    inner = model.head.forward
    model.head.forward = lambda x: model.head(x) if number == 2 else inner(x)
    for number in range(5):
        try:
            print(number, step(model, optimizer).hex(), flush=True)
        except RecursionError as error:
            print(number, str(error).partition(" exceeded")[0])


def memory_error_in_forward():
    import torch
    from training import make, step

    model, optimizer = make()
    model.head.register_forward_hook(lambda *_: torch.empty(1 << 60) if number == 2 else None)
    for number in range(5):
        try:
            print(number, step(model, optimizer).hex(), flush=True)
        except RuntimeError as error:
            print(number, str(error).partition("can't")[2])


def hook_with_training():
    import traceback

    from training import make, step

    def hook(kind, error, trace):
        print([frame.name for frame in traceback.extract_tb(trace)])

    sys.excepthook = hook
    model, optimizer = make()
    model.blocks[1].down.forward = lambda x: x / nothing  # noqa: F821
    step(model, optimizer)


def models_at_exit():
    import torch
    from training import train

    class Last(torch.nn.Linear):
        def __del__(self):
            print("gone")

    global model, last
    last = Last(2, 2)
    model, _ = train()
    model.register_buffer("noisy", torch.zeros(1))
    weakref.finalize(model, print, "model gone")
    atexit.register(lambda: print("evaluated", model(torch.ones(1, 16)).sum().item().hex()))


def trains_at_exit():
    import training

    atexit.register(training.train)


def trains_after_main():
    from training import train

    threading.Thread(target=train).start()


def killed_by_child():
    from training import train

    train()
    parent = os.getpid()
    if not os.fork():
        os.kill(parent, signal.SIGTERM)
        os._exit(0)
    time.sleep(60)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
