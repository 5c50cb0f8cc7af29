"""The docstring of main."""

import sys

main = sys.modules["__main__"]
for name in ("__name__", "__file__", "__spec__", "__package__", "__doc__", "__cached__"):
    print(name, repr(getattr(main, name, "absent")))
print(type(main.__loader__), main.__loader__.path, main.__builtins__)
print(sys.argv)
print(sys.orig_argv)
print(sys.executable, sys.prefix)
print(sys.path)
