import atexit
import os
import sys

atexit.register(print, "never printed")
print("lost in the buffer")
sys.stderr.write("written\n")
os._exit(7)
