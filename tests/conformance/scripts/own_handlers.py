import os
import signal


def handle(number, frame):
    print("got", signal.Signals(number).name, "in", frame.f_code.co_name, flush=True)


names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")
for name in names:
    signal.signal(getattr(signal, name), handle)


def send():
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))


send()
signal.raise_signal(signal.SIGTERM)
