import os
import signal
import sys

print("flushed", flush=True)
print("lost in the buffer")
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
signal.pause()
