import sys

# memprof's finder waits in sys.meta_path until torch is imported: the one thing a job can see of it.
print(sorted(sys.modules))
print(sys.flags)
print(sorted(sys.path_importer_cache))
print(sys.warnoptions, sys._xoptions, sys.dont_write_bytecode)
print(sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace(), sys.getprofile())
print(sys.getrecursionlimit(), sys.getswitchinterval())
print([getattr(finder, "__name__", "") for finder in sys.meta_path if type(finder).__name__ != "TorchFinder"])
print(sys.path_hooks)

import gc
import threading
import warnings

print(warnings.filters)
print([thread.name for thread in threading.enumerate()], gc.isenabled(), gc.get_threshold())
