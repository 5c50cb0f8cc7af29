import locale
import os
import resource
import signal
import sys

OWN = ("MEMPROF_SPOOL", "MEMPROF_SETTINGS", "MEMPROF_PACKAGE", "PYTHONPATH")

print(sorted((name, value) for name, value in os.environ.items() if name not in OWN and name != "_"))
for number in sorted(signal.valid_signals()):
    print(number, signal.getsignal(number), end=" ")
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
for name in sorted(dir(resource)):
    if name.startswith("RLIMIT_"):
        print(name, resource.getrlimit(getattr(resource, name)))
print(os.getpgrp() == os.getpid() or os.getpgrp() == os.getppid(), os.getsid(0) == os.getpgrp())
print(os.nice(0), oct(os.umask(0o22)), os.getcwd(), os.sched_getaffinity(0))
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.fileno(), stream.encoding, stream.errors, stream.line_buffering, stream.isatty())
print(locale.getlocale(), sys.getfilesystemencoding())
for descriptor in range(64):
    try:
        print(descriptor, os.get_inheritable(descriptor))
    except OSError:
        continue
