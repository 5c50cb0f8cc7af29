"""A recorded job holds memprof's own modules and no other package that it would not hold otherwise."""

import sys

from training import train

train()
own = {"memprof"}
names = {name.partition(".")[0] for name in sys.modules} - own - set(sys.stdlib_module_names)
print(sorted(names))
print([path for path in sys.path if "memprof" in path])
