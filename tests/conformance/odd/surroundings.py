"""Streams, folders, variables, limits, and whatever else a job reads or changes in its environment."""

from __future__ import annotations

from tests.conformance.odd.jobs import odd, shell

_LOOK = "{run} surroundings.py look"
_TRAINS = "{run} surroundings.py trains"

SURROUNDINGS = [
    *odd(
        "surroundings",
        "moves clears_environment clears_environment_late few_descriptors no_descriptors_at_start "
        "little_stack low_recursion umask drops_rights tidies_up time_patched time_fails builtins_patched "
        "builtins_fail modules_patched stdout_replaced stdout_closed own_finder finder_forbids no_finders "
        "torch_in_thread torch_lazily torch_again torch_found_only torch_pretended runs_path notebook doc_tests "
        "nested_record closes_descriptors",
        processor_limit=24,
        executes=1,
    ),
    shell("code that is typed", "printf 'x + 1\\nraise SystemExit(4)\\n' | {run} surroundings.py interacts", 4),
    # Inside memprof record it writes none.
    shell("memprof in the job", "OWN=. {run} surroundings.py uses_memprof && rm -f own.memprof"),
    # Streams.
    shell("stdin closed", "{run} surroundings.py streams <&-"),
    shell("stdout closed", "{run} surroundings.py streams >&-"),
    shell("stderr closed", "{run} surroundings.py streams 2>&-"),
    shell("all streams closed", "{run} surroundings.py streams <&- >&- 2>&-"),
    shell("a full disk as stdout", f"{_LOOK} > /dev/full", 120),
    shell("a pipe that nobody reads", "{{ {run} surroundings.py floods; echo status $? >&2; }} | head -1"),
    shell("one file as both streams", f"{_LOOK} </dev/null >out.txt 2>&1"),
    shell("a terminal", "{python} in_terminal.py {run} surroundings.py terminal"),
    # Folders.
    shell("a folder that may not be written", f"mkdir d && cp *.py d && cd d && chmod 500 . && {_TRAINS}; chmod 700 ."),
    shell("no temporary folder", f"TMPDIR=/nowhere {_TRAINS}"),
    shell("no home", f"unset HOME; {_LOOK}; HOME=/nowhere {_LOOK}"),
    shell("umask", f"umask 077; {_TRAINS}"),
    # Variables.
    shell("locale C", f"LC_ALL=C {_LOOK}"),
    shell("locale POSIX", f"LC_ALL=POSIX PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 {_LOOK}"),
    shell("encoding of streams", f"PYTHONIOENCODING=latin-1:replace PYTHONUTF8=1 {_LOOK}"),
    shell("PYTHONSTARTUP", "echo 'print(3)' > s.py; echo 'print(1)' | PYTHONSTARTUP=s.py {command} {python} -i -q"),
    shell("PYTHONSAFEPATH", f"PYTHONSAFEPATH=1 {_LOOK}"),
    shell("PYTHONPATH with gaps", f"PYTHONPATH=:/nowhere::own_site: {_LOOK}"),
    shell("PYTHONHOME", "PYTHONHOME=/nowhere {command} {python} surroundings.py look 2>/dev/null", 1),
    shell("PYTHONINSPECT", f"echo 'print(3)' | PYTHONINSPECT=1 {_LOOK}"),
    shell("PYTHONMALLOC", f"PYTHONMALLOC=debug PYTHONUNBUFFERED=1 PYTHONASYNCIODEBUG=1 {_LOOK}"),
    shell("compiled files nowhere", f"PYTHONDONTWRITEBYTECODE=1 {_TRAINS}"),
    shell("compiled files elsewhere", "{command} {python} -X pycache_prefix=cache surroundings.py look"),
    # Other users' sitecustomize.
    shell("sitecustomize that prints", f"PYTHONPATH=site_prints {_LOOK}"),
    shell("sitecustomize that fails", f"PYTHONPATH=site_fails {_LOOK}"),
    # Python's traceback of that shows how it was reached.
    shell("sitecustomize that ends Python", f"PYTHONPATH=site_ends {_LOOK} 2>/dev/null", 1),
    shell("sitecustomize that imports torch", f"PYTHONPATH=site_torch {_TRAINS}"),
    shell("sitecustomize that is a package", f"PYTHONPATH=site_package {_LOOK}"),
    shell(
        "usercustomize",
        # In a virtual environment, which reads none, that ends with status 1.
        "site=$(PYTHONUSERBASE=base {python} -m site --user-site); mkdir -p $site && cp user_site/* $site && "
        f"PYTHONUSERBASE=base {_LOOK}",
    ),
    # Limits.
    # Where all are taken while a session is open, torch's profiler says so once on stderr, as it ends.
    shell("no descriptors", "{run} surroundings.py no_descriptors 2>/dev/null"),
    shell("few descriptors", f"ulimit -n 40; {_TRAINS}"),
    shell("little address space", f"ulimit -v 6000000; {_TRAINS}"),
    shell("a small stack", f"ulimit -s 512; {_LOOK}"),
    shell("no core files", "ulimit -c 0; {run} exits.py aborts", 134),
    shell("an ignored signal", "trap '' INT; {run} signals.py inherited"),
]
