"""What a program does with processes, one function a case."""

import concurrent.futures
import multiprocessing
import os
import signal
import subprocess
import sys
import time


def forks():
    for status in (0, 3):
        process = os.fork()
        if not process:
            print("child", flush=True)
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def daemonises():
    """Forks twice; what is left prints when the program has ended long ago."""
    if os.fork():
        print("first ends", flush=True)
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(0.5)
    print("daemon", os.getpgrp() != os.getpid(), flush=True)
    with open("daemon.txt", "w") as file:
        file.write("done")


def leaves_orphan():
    subprocess.Popen([sys.executable, "-Sc", "import time; time.sleep(0.7); print('orphan', flush=True)"])
    print("parent ends", flush=True)


def execs_itself():
    if "AGAIN" in os.environ:
        print("again", sys.argv, sys.flags.optimize)
        return
    os.environ["AGAIN"] = "1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-O", *sys.argv])


def execs_after_training():
    from training import train

    train()
    execs_itself()


def execs_in_training():
    from training import make, step

    model, optimizer = make()
    for number in range(5):
        print(number, step(model, optimizer).hex(), flush=True)
        if number == 2 and "AGAIN" not in os.environ:
            os.environ["AGAIN"] = "1"
            os.execv(sys.executable, [sys.executable, *sys.argv])


def execs_other():
    sys.stdout.flush()
    os.execvp("sh", ["sh", "-c", "echo shell; exit 4"])


def empty_environment():
    print(subprocess.run([sys.executable, "-c", "import os; print(sorted(os.environ))"], env={}).returncode)
    os.environ.clear()
    print(subprocess.run([sys.executable, "-c", "import os, sys; print(len(os.environ), sys.flags)"]).returncode)


def own_descriptors():
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    words = [sys.executable, "-Sc", f"import os; os.write({writing}, b'inherited')"]
    subprocess.run(words, close_fds=False)
    print(os.read(reading, 99), reading, writing)


def new_session():
    words = [sys.executable, "-Sc", "import os; print(os.getsid(0) == os.getpid())"]
    print(subprocess.run(words, start_new_session=True, capture_output=True, text=True))
    print(subprocess.run(words, preexec_fn=os.setsid, stdout=subprocess.PIPE).stdout)


def spawns():
    print(os.system("exit 3") >> 8, os.popen("echo shell").read())
    process = os.posix_spawn(sys.executable, [sys.executable, "-c", "raise SystemExit(5)"], os.environ)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def times_out():
    try:
        subprocess.run([sys.executable, "-Sc", "import time; time.sleep(60)"], timeout=0.3)
    except subprocess.TimeoutExpired as error:
        print(error.timeout > 0.2)


def children_flags():
    for flags in ("-I", "-S", "-E", "-s", "-P", "-B", "-X utf8", "-W error", "-OO", "-X dev"):
        words = [sys.executable, *flags.split(), "-c", "import sys; print(sys.flags, sys.warnoptions)"]
        print(subprocess.run(words, capture_output=True))


def square(x):
    return x * x


def fails(x):
    raise ValueError(x)


def starts(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=queue.put, args=({"a": 1},), name="one")
    process.start()
    print(queue.get(), process.join(), process.exitcode)
    failing = context.Process(target=fails, args=(3,), name="two")
    failing.start()
    failing.join()
    print(failing.exitcode)
    with context.Pool(2) as pool:
        print(pool.map(square, range(5)))
        try:
            pool.apply(fails, (4,))
        except ValueError as error:
            print(error)
    killed = context.Process(target=time.sleep, args=(60,))
    killed.start()
    killed.terminate()
    killed.join()
    print(killed.exitcode)


def fork():
    starts("fork")


def spawn():
    starts("spawn")


def forkserver():
    starts("forkserver")


def manager():
    with multiprocessing.Manager() as shared:
        table = shared.dict(a=1)
        worker = multiprocessing.Process(target=table.update, args=({"b": 2},))
        worker.start()
        worker.join()
        print(sorted(table.items()))


def futures():
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        print(list(pool.map(square, range(4))))
        print(repr(pool.submit(fails, 5).exception()))
        try:
            pool.submit(os._exit, 3).result()
        except concurrent.futures.process.BrokenProcessPool as error:
            print(type(error).__name__)


def dies_with_children():
    process = subprocess.Popen(["sleep", "0.3"])
    print("dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    process.wait()


def train_share(seed):
    from training import make, step

    model, optimizer = make(seed)
    return [step(model, optimizer).hex() for _ in range(4)]


def trains_in_pool():
    import torch.multiprocessing

    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(train_share, range(2)))


def shapes(model, queue):
    queue.put([tuple(parameter.shape) for parameter in model.parameters()][:3])


def shares_model():
    """A model in shared memory goes to another process, before and between its steps."""
    import torch.multiprocessing
    from training import make, step

    context = torch.multiprocessing.get_context("spawn")
    model, optimizer = make()
    model.share_memory()
    queue = context.SimpleQueue()
    for number in range(4):
        print(number, step(model, optimizer).hex(), flush=True)
        if number % 2 == 0:
            process = context.Process(target=shapes, args=(model, queue))
            process.start()
            print(queue.get(), process.join(), process.exitcode, flush=True)


def trains_in_fork():
    from training import train

    train()
    sys.stdout.flush()
    process = os.fork()
    if not process:
        train()
        sys.stdout.flush()
        os._exit(4)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    train()


def forks_in_step():
    from training import make, step

    def fork_here(*_):
        sys.stdout.flush()
        process = os.fork()
        if not process:
            print("child", number, flush=True)
            os._exit(number)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)

    model, optimizer = make()
    model.head.register_forward_hook(fork_here)
    for number in range(5):
        print(number, step(model, optimizer).hex(), flush=True)


def forks_in_backward():
    from training import make, step

    def fork_here(gradient):
        sys.stdout.flush()
        process = os.fork()
        if not process:
            os._exit(number)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)

    model, optimizer = make()
    model.head.weight.register_hook(fork_here)
    for number in range(5):
        print(number, step(model, optimizer).hex(), flush=True)


def fork_ends_in_order():
    from training import make, step

    model, optimizer = make()
    for number in range(5):
        print(number, step(model, optimizer).hex(), flush=True)
        if number == 2:
            process = os.fork()
            if not process:
                return
            print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def loads():
    import torch
    from torch.utils.data import DataLoader, IterableDataset
    from training import make, step

    class Numbers(IterableDataset):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            yield from (torch.full((16,), float(info.id + number)) for number in range(8))

    model, optimizer = make()
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, persistent_workers=True, prefetch_factor=1)
    for epoch in range(3):
        for batch in loader:
            print(epoch, step(model, optimizer, batch).hex())
    print(os.getpid() == multiprocessing.parent_process() or len(multiprocessing.active_children()))


def worker_init(number):
    print("worker", number, flush=True)


def loads_and_fails():
    from torch.utils.data import DataLoader
    from training import make, step

    import torch

    class Failing:
        def __len__(self):
            return 16

        def __getitem__(self, index):
            if index == 13:
                raise KeyError("thirteen")
            return torch.full((16,), float(index))

    model, optimizer = make()
    for batch in DataLoader(Failing(), batch_size=4, num_workers=1, worker_init_fn=worker_init):
        print(step(model, optimizer, batch).hex(), flush=True)


def worker_killed():
    from torch.utils.data import DataLoader
    from training import make, step

    import torch

    class Dying:
        def __len__(self):
            return 16

        def __getitem__(self, index):
            if index == 13:
                os._exit(9)
            return torch.full((16,), float(index))

    model, optimizer = make()
    sys.unraisablehook = lambda _: None  # whether the end of the loader notices it too depends on timing
    try:
        for batch in DataLoader(Dying(), batch_size=4, num_workers=1):
            step(model, optimizer, batch)  # how often depends on when it is noticed
    except (RuntimeError, OSError):  # which of them depends on how far the worker's messages came
        print("a worker died")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
