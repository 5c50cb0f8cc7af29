"""Runs first in every Python process of a recorded job, waits for torch, then starts the recorder.

``memprof record`` puts this folder first on ``PYTHONPATH``; Python's ``site`` module imports ``sitecustomize``
before anything of the job's. What the job can see stays as it would be: this folder leaves ``sys.path``, another
``sitecustomize`` runs as it would have, and where there is none, none stays in ``sys.modules``. No frame of this
file is ever on the stack while torch is imported, so a torch that fails to import shows its own traceback.

The interpreter may be any (a job may start an older Python than memprof needs), so this file keeps to syntax of
Python 3.6 and imports nothing at the start that the interpreter has not imported already.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:
    # importlib.machinery itself is not imported yet, and a job may look at sys.modules.
    ModuleSpec = type(sys.__spec__)

HERE = os.path.dirname(os.path.abspath(__file__))
#: The system's clock, before the job may replace it; None where the interpreter has not imported ``time`` yet.
CLOCK_NS = getattr(sys.modules.get("time"), "time_ns", None)


def open_own(path: str, flags: int) -> int:
    """Opens a file as its owner's alone, whatever the umask is."""
    return os.open(path, flags, 0o600)


def leave_mark(name: str) -> None:
    """Creates an empty file in the spool folder, which shows the parent how far a process of the job came."""
    try:
        os.close(open_own(os.path.join(os.environ["MEMPROF_SPOOL"], name), os.O_CREAT | os.O_WRONLY))
    except (KeyError, OSError):
        # Nobody waits for the mark any more: the recording is over, or the job cleared its environment.
        pass


def write_log(text: str) -> None:
    """Notes in the spool folder why the recorder did not start in this process; the job must not notice."""
    try:
        path = os.path.join(os.environ["MEMPROF_SPOOL"], "bootstrap-%d.log" % os.getpid())
        with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=open_own) as log:
            log.write(text.rstrip("\n") + "\n")
    except (KeyError, OSError):
        # As in leave_mark.
        pass


class WatchedSpec(ModuleSpec):
    """The spec of torch until its import has ended, which the import system marks by clearing ``_initializing``.

    A loader wrapped around torch's own would do the same in view of everybody: as a frame in each traceback out of
    ``import torch``, and as ``torch.__loader__``.
    """

    def __setattr__(self, name: str, value: object) -> None:
        ModuleSpec.__setattr__(self, name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            # After a failed import torch is not in sys.modules; the job may try again.
            if "torch" in sys.modules:
                torch_is_imported()


WatchedSpec.__name__ = WatchedSpec.__qualname__ = ModuleSpec.__name__


class TorchFinder:
    """A meta path entry that lets the others find torch, and has the spec they find watched."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Finds ``torch`` through the other entries, and nothing else."""
        if name != "torch":
            return None
        for finder in list(sys.meta_path):
            # A finder of the oldest kind has no find_spec; Python leaves it out too.
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: "ModuleSpec | None" = finder.find_spec(name, path, target)
            if spec is not None:
                if type(spec) is ModuleSpec:
                    spec.__class__ = WatchedSpec
                return spec
        return None


FINDER = TorchFinder()


def torch_is_imported() -> None:
    """Starts the recorder in this process; whatever goes wrong, the job goes on without it."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
    leave_mark("torch-imported")
    try:
        start_recorder()
    except BaseException as error:
        # The job may not go on without its plan, and an interrupt is for the job; a hook of its own may raise both.
        if (isinstance(error, SystemExit) and error.code == 125) or is_signal(error):
            raise
        import traceback

        write_log(traceback.format_exc())


def is_signal(error: BaseException) -> bool:
    """Returns whether an interrupt comes from a signal: from its handler, or from between any two instructions."""
    import signal
    from opcode import opname

    trace, handler = error.__traceback__, getattr(signal.getsignal(signal.SIGINT), "__code__", None)
    if not isinstance(error, KeyboardInterrupt) or trace is None:
        return False
    while trace.tb_next is not None and trace.tb_frame.f_code is not handler:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return code is handler or opname[code.co_code[trace.tb_lasti]] not in ("RAISE_VARARGS", "RERAISE")


def start_recorder() -> None:
    """Loads memprof and hands over to the child's side of the launcher."""
    import json

    settings = json.loads(os.environ["MEMPROF_SETTINGS"])
    settings["spool"] = os.environ["MEMPROF_SPOOL"]
    if sys.version_info[:2] < (3, 11):
        raise RuntimeError("memprof records under Python 3.11 or newer; this is Python " + sys.version.split()[0])
    has_own_cache = getattr(sys, "pycache_prefix", None) is not None
    writes_no_bytecode = sys.dont_write_bytecode
    # Where compiled files go to a folder of the job's choice, ours must not lie among its own.
    sys.dont_write_bytecode = writes_no_bytecode or has_own_cache
    try:
        load_memprof(os.environ["MEMPROF_PACKAGE"])

        from memprof.recorder import clock

        clock.clock_ns = CLOCK_NS or clock.clock_ns  # before other modules take it
        from memprof.launch.child import install
    finally:
        sys.dont_write_bytecode = writes_no_bytecode

    install(settings)


def serve_ranks(descriptor: int) -> None:
    """Makes this process the one from which ranks are forked; returns in each of them."""
    try:
        load_memprof(os.environ["MEMPROF_PACKAGE"])
        from memprof.launch.dry.fork_server import serve

        serve(descriptor)
    except Exception:
        import traceback

        write_log(traceback.format_exc())
        os._exit(1)  # the parent starts the ranks without a fork


def load_memprof(folder: str) -> None:
    """Makes ``memprof`` importable, as the very code that the parent runs, without touching sys.path.

    Raises:
        ImportError: The job has a module of its own by that name, which must stay reachable.
    """
    from importlib.util import find_spec, module_from_spec, spec_from_file_location

    # A process that uses memprof itself, or was forked from a recorded one, has it already.
    present = sys.modules.get("memprof")
    found = present.__spec__ if present is not None else find_spec("memprof")
    # A folder that happens to be called memprof is found too, but has no code and no origin.
    origin = getattr(found, "origin", None)
    if origin and not os.path.exists(os.path.join(os.path.dirname(origin), "launch", "child.py")):
        raise ImportError("the job has a module of its own called memprof: " + origin)
    if present is not None:
        return
    spec = spec_from_file_location("memprof", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError("there is no memprof package in %s" % folder)
    package = module_from_spec(spec)
    sys.modules["memprof"] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["memprof"]
        raise


def leave_cache() -> None:
    """Removes what Python compiled of this file into a folder of the job's choice, and folders made for that alone."""
    prefix = getattr(sys, "pycache_prefix", None)
    compiled = globals().get("__cached__")
    if prefix is None or compiled is None:
        return
    try:
        os.unlink(compiled)
        folder = os.path.dirname(compiled)
        while len(folder) > len(os.path.abspath(prefix)):
            os.rmdir(folder)
            folder = os.path.dirname(folder)
    except OSError:
        # Python wrote none, or the folder holds more.
        pass


def start() -> None:
    """Takes this folder off the job's sys.path and begins to wait for torch."""
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    sys.path_importer_cache.pop(HERE, None)
    leave_cache()
    # Without a spool this process only inherited PYTHONPATH: nobody records it.
    if not os.path.isdir(os.environ.get("MEMPROF_SPOOL", "")):
        return
    leave_mark("python-started")
    if "MEMPROF_FORK" in os.environ:
        serve_ranks(int(os.environ.pop("MEMPROF_FORK")))
    if "torch" in sys.modules:
        torch_is_imported()
    else:
        sys.meta_path.insert(0, FINDER)


start()

# Now the import that Python would have made without this file. Where there is no other sitecustomize it raises the
# very error that site.py expects, and the import system forgets this module.
del sys.modules["sitecustomize"]
__import__("sitecustomize")
