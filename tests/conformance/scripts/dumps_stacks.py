import faulthandler
import signal
import sys

from training import make, train

model, optimizer = make()
faulthandler.enable()
forward = model.head.forward


def dumping(x):
    faulthandler.dump_traceback(file=sys.stderr, all_threads=False)
    return forward(x)


model.head.forward = dumping
train(model, optimizer)
signal.raise_signal(signal.SIGSEGV)
