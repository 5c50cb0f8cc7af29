"""Signals its whole process group, as Ctrl-C in a terminal does: each handler must run once."""

import os
import signal
import time

count = {}


def handle(number, frame):
    count[number] = count.get(number, 0) + 1


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, handle)
    os.killpg(os.getpgrp(), number)
    time.sleep(0.5)
print(count)
