"""A program whose surroundings are odd: files, folders, limits, patches of the standard library; one function a case."""

import builtins
import code
import importlib
import importlib.util
import io
import json
import os
import resource
import runpy
import shutil
import sys
import threading
import time


def trains():
    from training import train

    train()


def look():
    print(sys.argv, __name__, __file__, sys.path[0], sys.flags, __doc__ is None, os.path.basename(os.getcwd()))
    print(sys.stdin and sys.stdin.encoding, sys.stdout and sys.stdout.encoding, sys.getfilesystemencoding())


def arguments():
    print(*sys.argv)


def streams():
    """Says on a file what it finds of its streams."""
    with open("streams.txt", "w") as file:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            print(stream is None or (stream.fileno(), stream.encoding, stream.errors, stream.isatty()), file=file)
        for descriptor in range(3):
            try:
                print(descriptor, os.fstat(descriptor).st_mode, file=file)
            except OSError as error:
                print(descriptor, error, file=file)
    trains()


def terminal():
    """In a terminal: the job is in the foreground, gets SIGWINCH, and reads lines as they are typed."""
    print([os.isatty(number) for number in range(3)], os.get_terminal_size())
    print(os.tcgetpgrp(0) == os.getpgrp(), os.ttyname(0) == os.ttyname(1), input("name? "))


def floods():
    for number in range(100_000):
        print(number, "a line that is not read")


def moves():
    from training import make, step

    model, optimizer = make()
    os.mkdir("other")
    for number in range(5):
        print(number, step(model, optimizer).hex())
        if number == 1:
            os.chdir("other")
        if number == 2:
            os.rmdir("../other")
    with open("/proc/self/comm") as file:
        print(file.read())


def clears_environment():
    os.environ.clear()
    trains()
    print(sorted(os.environ))


def clears_environment_late():
    from training import make, step

    model, optimizer = make()
    for number in range(5):
        os.environ.clear()
        print(number, step(model, optimizer).hex())


def few_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    trains()


def no_descriptors():
    from training import make, step

    model, optimizer = make()
    kept = []
    for number in range(6):
        try:
            while number == 1:
                kept.append(os.open("/dev/null", os.O_RDONLY))
                if len(kept) == 1:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (kept[0] + 3, 4096))
        except OSError as error:
            print(error.strerror)
        print(number, step(model, optimizer).hex())


def no_descriptors_at_start():
    """None are left when the first model is called."""
    from training import make, step

    import training

    import torch

    model, optimizer = make()
    with torch.autograd.profiler.record_function("sets itself up"):  # and complains where it can open no file
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (os.open("/dev/null", os.O_RDONLY) + 1, 4096))
    for number in range(training.STEPS):
        print(number, step(model, optimizer).hex())


def processor_limit():
    import signal

    from training import make, step

    used = resource.getrusage(resource.RUSAGE_SELF)
    signal.signal(signal.SIGXCPU, lambda *_: print("enough") or sys.exit(24))
    make()
    now = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(now.ru_utime + now.ru_stime) + 2, resource.RLIM_INFINITY))
    model, optimizer = make()
    while used:
        step(model, optimizer)


def little_stack():
    worker_stack = threading.stack_size(512 * 1024)
    worker = threading.Thread(target=trains)
    worker.start()
    worker.join()
    print(worker_stack)


def low_recursion():
    from training import make, step

    model, optimizer = make()
    step(model, optimizer)
    depth = sys.getrecursionlimit()
    for number in range(5):
        sys.setrecursionlimit(60)
        try:
            value = step(model, optimizer)
        finally:
            sys.setrecursionlimit(depth)
        print(number, value.hex())


def umask():
    os.umask(0o777)
    trains()
    with open("mine.txt", "w") as file:
        print(oct(os.fstat(file.fileno()).st_mode))


def drops_rights():
    from training import make, step

    model, optimizer = make()
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    for number in range(5):
        print(number, step(model, optimizer).hex())


def tidies_up():
    """Removes everything in its own and its parent folder, like a job that cleans its scratch space."""
    from training import make, step

    model, optimizer = make()
    for number in range(5):
        print(number, step(model, optimizer).hex())
        for folder in (".", ".."):
            for name in os.listdir(folder):
                if name.endswith(".spool"):
                    shutil.rmtree(os.path.join(folder, name))


def time_patched():
    real = time.time
    for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep"):
        setattr(time, name, lambda *_: 1_000_000)
    from training import train

    train(before=lambda _: print(time.time(), time.time_ns(), time.monotonic()))
    print(real() > 1e9)


def time_fails():
    from training import make, step

    def fail(*_):
        raise RuntimeError("no time here")

    model, optimizer = make()
    for number in range(5):
        time.time_ns = time.time = time.perf_counter = fail
        print(number, step(model, optimizer).hex())


def builtins_patched():
    lines = []
    opened = []
    original, original_print = open, print

    def own_open(path, *args, **kwargs):
        opened.append(str(path))
        return original(path, *args, **kwargs)

    from training import make, step

    model, optimizer = make()
    builtins.open = own_open
    builtins.print = lambda *args, **_: lines.append(args)
    for number in range(5):
        print(number, step(model, optimizer).hex())
    builtins.print = original_print
    print(lines, opened)


def builtins_fail():
    from training import make, step

    def fail(*_, **__):
        raise RuntimeError("not here")

    model, optimizer = make()
    step(model, optimizer)
    own_import = builtins.__import__

    def imports(name, *args):
        return own_import(name, *args) if name in sys.modules or not name.startswith("memprof") else fail()

    builtins.open, builtins.__import__, builtins.compile, builtins.eval = fail, imports, fail, fail
    for number in range(5):
        print(number, step(model, optimizer).hex())


def modules_patched():
    """Functions that others use too are replaced, as mocks do."""
    from training import make, step

    def fail(*_, **__):
        raise RuntimeError("not here")

    model, optimizer = make()
    step(model, optimizer)
    for owner, name in ((json, "dumps"), (json, "loads"), (os, "write"), (os, "open"), (os.path, "exists")):
        setattr(owner, name, fail)
    for number in range(5):
        print(number, step(model, optimizer).hex())


def stdout_replaced():
    from training import make, step

    model, optimizer = make()
    original, sys.stdout, sys.stderr = sys.stdout, io.StringIO(), io.StringIO()
    for number in range(5):
        print(number, step(model, optimizer).hex())
    text, errors = sys.stdout.getvalue(), sys.stderr.getvalue()
    sys.stdout = original
    print(text, len(errors))


def stdout_closed():
    sys.stdout.close()
    os.close(1)
    trains_quietly()


def trains_quietly():
    from training import make, step

    model, optimizer = make()
    with open("losses.txt", "w") as file:
        for number in range(5):
            file.write(f"{number} {step(model, optimizer).hex()} {file.fileno()}\n")


def closes_descriptors():
    """As a daemon does; the files it opens next get the numbers that are free."""
    from training import make, step

    model, optimizer = make()
    for number in range(5):
        print(number, step(model, optimizer).hex())
        if number in (0, 2):
            os.closerange(3, 4096)
            kept = [os.open(f"file{number}-{each}.txt", os.O_WRONLY | os.O_CREAT) for each in range(40)]
            print(kept, [os.write(each, b"mine") for each in kept])
            os.close(kept[0])


class Finder:
    def __init__(self):
        self.names = []

    def find_spec(self, name, path=None, target=None):
        self.names.append(name)
        return None


def own_finder():
    finder = Finder()
    sys.meta_path.insert(0, finder)
    import torch

    print(sys.meta_path[0] is finder, type(torch.__spec__).__name__, type(torch.__loader__).__name__)
    print("torch" in finder.names, torch.__spec__.origin.endswith("__init__.py"))
    trains()


def finder_forbids():
    """Whatever it has not met before it starts may not be imported."""
    import torch.optim  # noqa: F401
    from training import make, step

    class Forbids:
        def find_spec(self, name, path=None, target=None):
            raise ImportError(f"{name} is not allowed")

    model, optimizer = make()
    step(model, optimizer)
    sys.meta_path.insert(0, Forbids())
    for number in range(5):
        print(number, step(model, optimizer).hex())


def no_finders():
    from training import make, step

    model, optimizer = make()
    step(model, optimizer)
    sys.meta_path.clear()
    sys.path.clear()
    for number in range(5):
        print(number, step(model, optimizer).hex())


def torch_in_thread():
    worker = threading.Thread(target=importlib.import_module, args=("torch",))
    worker.start()
    worker.join()
    trains()


def torch_lazily():
    spec = importlib.util.find_spec("torch")
    loader = importlib.util.LazyLoader(spec.loader)
    spec.loader = loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch"] = module
    loader.exec_module(module)
    print(module.ones(2))
    trains()


def torch_again():
    import torch

    kept = sys.modules.pop("torch")
    sys.modules["torch"] = kept
    print(importlib.import_module("torch") is torch)
    del sys.modules["torch.nn.utils.rnn"]
    trains()


def torch_found_only():
    print(importlib.util.find_spec("torch").name, "torch" in sys.modules)
    print([type(finder).__name__ for finder in sys.meta_path if type(finder).__module__ not in ("__main__", "sitecustomize")])


def torch_pretended():
    import types

    sys.modules["torch"] = types.ModuleType("torch")
    import torch

    print(torch, sorted(vars(torch)))


def runs_path():
    print(sorted(runpy.run_path("training.py", run_name="__main__"))[-3:])
    runpy.run_module("trains", run_name="__main__", alter_sys=True)


def executes():
    source = "from training import train\ndef go():\n    return train()\ngo()\nraise ValueError('executed')"
    exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})


def interacts():
    code.interact(banner="hello", local={"x": 3}, exitmsg="bye")


def notebook():
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_cell("from training import train")
    print(shell.run_cell("train();").success)


def doc_tests():
    import doctest
    import unittest

    class Case(unittest.TestCase):
        def test_trains(self):
            """
            >>> 1 + 1
            2
            """
            trains()

    sys.modules["__main__"].Case = Case
    print(doctest.testmod())
    runner = unittest.TextTestRunner(stream=io.StringIO())
    print(runner.run(unittest.defaultTestLoader.loadTestsFromTestCase(Case)))


def uses_memprof():
    import memprof
    from training import make, step

    model, optimizer = make()
    with memprof.record(os.path.join(os.environ["OWN"], "own.memprof"), skip=0, steps=2, force=True) as recorder:
        for number in range(4):
            print(number, step(model, optimizer).hex())
    print(recorder.path.name)


def nested_record():
    import subprocess

    words = [sys.executable, "-P", "-m", "memprof.cli.main", "record", "-q", "-f", "-o", "inner.memprof", "trains.py"]
    print(subprocess.run(words, stdout=subprocess.DEVNULL).returncode, os.path.exists("inner.memprof"))
    os.unlink("inner.memprof")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name == "--":  # the rest is arguments
            break
        globals()[name]()
