import os
import signal
import time


def work():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


try:
    work()
finally:
    print("cleaned up")
