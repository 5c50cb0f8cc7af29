import atexit
import sys
import threading
import time
import weakref


class Witness:
    def __del__(self):
        print("deleted")


atexit.register(print, "first registered")
atexit.register(print, "second registered")
weakref.finalize(Witness, print, "finalized")
thread = threading.Thread(target=lambda: (time.sleep(0.2), print("thread ended")))
thread.start()
witness = Witness()
print("main ended")
atexit.register(sys.stderr.write, "third registered\n")
