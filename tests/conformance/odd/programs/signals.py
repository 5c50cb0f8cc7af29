"""What a program does with signals, one function a case."""

import faulthandler
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time


def alarm():
    signal.alarm(1)
    time.sleep(60)


def timer():
    ticks = []
    signal.signal(signal.SIGALRM, lambda number, frame: ticks.append(frame.f_code.co_name))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    while len(ticks) < 3:
        signal.pause()
    print(set(ticks), signal.setitimer(signal.ITIMER_REAL, 0)[1])


def processor_timer():
    ticks = []
    signal.signal(signal.SIGPROF, lambda *_: ticks.append(1))
    signal.setitimer(signal.ITIMER_PROF, 0.01, 0.01)
    while len(ticks) < 3:
        sum(range(1000))
    signal.setitimer(signal.ITIMER_PROF, 0)
    print("three ticks")


def child_ends():
    seen = []
    signal.signal(signal.SIGCHLD, lambda number, frame: seen.append(os.waitpid(-1, os.WNOHANG)[1]))
    process = os.fork()
    if not process:
        os._exit(3)
    while not seen:
        time.sleep(0.01)
    print(seen, signal.getsignal(signal.SIGCHLD).__name__)


def children_ignored():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if not os.fork():
        os._exit(3)
    try:
        os.waitpid(-1, 0)
    except ChildProcessError as error:
        print(error)


def waits():
    wanted = {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    for number in sorted(wanted):
        os.kill(os.getpid(), number)
    print(sorted(signal.sigpending()))
    print(sorted(signal.sigwait(wanted) for _ in wanted), signal.sigtimedwait(wanted, 0))


def wakes_up():
    here, there = socket.socketpair()
    there.setblocking(False)
    print(signal.set_wakeup_fd(there.fileno()))
    signal.signal(signal.SIGUSR1, lambda *_: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    select.select([here], [], [])
    print(here.recv(16), signal.set_wakeup_fd(-1) == there.fileno())


def pipe_kills():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    reading, writing = os.pipe()
    os.close(reading)
    os.write(writing, b"x")


def pipe_is_ignored():
    print(signal.getsignal(signal.SIGPIPE))
    reading, writing = os.pipe()
    os.close(reading)
    try:
        os.write(writing, b"x")
    except BrokenPipeError as error:
        print(error)


def dumps():
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    faulthandler.dump_traceback_later(0.05)
    time.sleep(0.5)
    print(faulthandler.is_enabled(), faulthandler.unregister(signal.SIGUSR1))


def to_thread():
    signal.signal(signal.SIGUSR2, lambda *_: print(threading.current_thread().name))
    worker = threading.Thread(target=time.sleep, args=(0.2,))
    worker.start()
    signal.pthread_kill(worker.ident, signal.SIGUSR2)
    worker.join()


def stops():
    sleeper = subprocess.Popen([sys.executable, "-Sc", f"import os, time; time.sleep(1); os.kill({os.getpid()}, 18)"])
    os.kill(os.getpid(), signal.SIGSTOP)
    print("went on", sleeper.wait())


def raises():
    def handler(number, frame):
        raise TimeoutError("too late")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(60)


def inherited():
    print([(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)])
    print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    os.kill(os.getpid(), signal.SIGINT)
    print("still here")


def own_group():
    process = os.fork()
    if not process:
        os.setpgid(0, 0)
        os.killpg(os.getpgrp(), signal.SIGTERM)
        time.sleep(60)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def own_session():
    process = os.fork()
    if process:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    os.setsid()
    print(os.getsid(0) == os.getpid() == os.getpgrp(), flush=True)
    os._exit(8)


def checkpoint_on_term():
    import torch
    from training import make, step

    wanted = []
    signal.signal(signal.SIGTERM, lambda *_: wanted.append(True))
    model, optimizer = make()
    for number in range(9):
        print(number, step(model, optimizer).hex(), flush=True)
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        if wanted:
            torch.save(model.state_dict(), "last.pt")
            print("saved", sorted(torch.load("last.pt"))[0])
            sys.exit(85)


def raised_in_forward():
    import torch
    from training import make, step

    def handler(number, frame):
        raise TimeoutError("too late")

    signal.signal(signal.SIGUSR1, handler)
    model, optimizer = make()
    model.head.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGUSR1) if number == 2 else None)
    for number in range(6):
        try:
            print(number, step(model, optimizer).hex())
        except TimeoutError as error:
            print(number, error, torch.is_grad_enabled())


def timer_in_steps():
    from training import train

    ticks = []
    signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    train()
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(bool(ticks))


def wakeup_in_steps():
    from training import train

    here, there = socket.socketpair()
    there.setblocking(False)
    signal.set_wakeup_fd(there.fileno())
    signal.signal(signal.SIGUSR1, lambda *_: None)
    train(before=lambda _: os.kill(os.getpid(), signal.SIGUSR1))
    print(here.recv(64), signal.set_wakeup_fd(-1) == there.fileno())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
