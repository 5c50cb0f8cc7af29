"""Children of every kind before torch is imported."""

import multiprocessing
import os
import sys


def work(number):
    print("child", number, __name__, sys.argv, sorted(name for name in sys.modules if "memprof" in name), flush=True)
    if number == 1:
        sys.exit(4)
    if number == 2:
        raise ValueError("in a child")


if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        for number in range(3):
            process = context.Process(target=work, args=(number,))
            process.start()
            process.join()
            print(method, number, process.exitcode, flush=True)
    child = os.fork()
    if child == 0:
        print("plain fork", flush=True)
        os._exit(9)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
