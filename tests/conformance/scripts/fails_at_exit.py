import atexit
import threading


class Witness:
    def __del__(self):
        raise ValueError("in a destructor")


def fail():
    raise LookupError("in a thread")


atexit.register(lambda: 1 / 0)
thread = threading.Thread(target=fail, name="the thread")
thread.start()
thread.join()
Witness()
