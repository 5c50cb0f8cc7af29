"""Follows the code that inductor generates in a real run: its buffers and kernels, with their modules and lines.

Inductor (torch/_inductor) writes one Python module for each graph, whose code allocates buffers and calls fused kernels
without torch's dispatcher. While operators are recorded, these functions are replaced among the module's globals by
functions that call them and log the call. Outside that time the code runs as it is.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from uuid import uuid4

import torch

from memprof.recorder.calls.modules import wrap_body
from memprof.recorder.calls.operator_rows import OperatorRows
from memprof.recorder.calls.operator_traits import OperatorTraits
from memprof.recorder.calls.tracebacks import recompiled
from memprof.recorder.compiled.generated_operators import KernelAccess, allocation_traits, cpp_kernels, kernel_traits
from memprof.recorder.compiled.late_import import LateImport
from memprof.recorder.compiled.memory_settings import MemorySettings
from memprof.recorder.compiled.provenance import Provenance, has_origins
from memprof.recorder.compiled.uncompiled import skip_compiling
from memprof.recorder.operators import OperatorMode
from memprof.trace.files.spool import COMPILED

_LOWERING, _LOADING = "torch._inductor.graph", "torch._inductor.codecache"
_ENTER, _EXIT = "__memprof_enter__", "__memprof_exit__"
#: How the names of functions begin that allocate a buffer, among the globals of generated code.
_ALLOCATING = "empty_strided_"
#: In the globals of code whose buffers are allocated in C++.
_CPP_WRAPPER = "CppWrapperCodeCache"


@dataclass(frozen=True)
class _Generated:
    """A module of generated code.

    Attributes:
        module: The module, while it exists.
        kernels: Names of its kernels in C++, each with the arguments that it writes to.
    """

    module: weakref.ref[ModuleType]
    kernels: tuple[tuple[str, KernelAccess], ...]


class GeneratedModules:
    """The modules of generated code that a process has loaded, from its first compilation on.

    Whatever is unexpected in this version of torch leaves regions recorded as a whole, and a note gives the reason.
    """

    def __init__(self) -> None:
        self._provenance = Provenance()
        self._cache = GraphCache()
        self._settings = MemorySettings()
        self._import = LateImport(
            Path(torch.__file__).parent / "_inductor", {_LOWERING: self._hook_lowering, _LOADING: self._hook_loading}
        )
        self._hooked: list[tuple[FunctionType, CodeType]] = []
        self._known: list[_Generated] = []
        self._replaced: list[tuple[weakref.ref[ModuleType], str, Any]] = []
        self._mode: OperatorMode | None = None
        self._allocation: OperatorTraits | None = None
        self._is_on = False
        self._in_cpp: weakref.WeakSet[ModuleType] = weakref.WeakSet()
        self._fault = ""

    # -- compilation --------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Follows every graph that is compiled from now on."""
        kind = type(self)
        skip_compiling(OperatorMode.run_generated, kind._begin, kind._add_lowered, kind._add_loaded)
        if not self._import.install():
            self._fault = "inductor is not imported from a folder"

    def remove(self) -> None:
        """Follows no further graph, and restores all generated code."""
        self._import.remove()
        self._cache.restore()
        for function, code in self._hooked:
            function.__code__ = code
        self._hooked.clear()
        self.switch_off()

    def notes(self) -> list[str]:
        """Returns notes on compiled regions: settings, and which of them are recorded as a whole."""
        modules = [module for each in self._known if (module := each.module()) is not None]
        unknown = sum(not has_origins(module) for module in modules)
        notes = self._settings.sentences()
        if self._fault and (modules or self._in_cpp or _LOADING in sys.modules):
            notes.append(
                f"{COMPILED}: modules and lines inside compiled regions are unknown with torch {torch.__version__}: "
                f"{self._fault}"
            )
        elif unknown:
            graphs = "1 graph was" if unknown == 1 else f"{unknown} graphs were"
            notes.append(
                f"{COMPILED}: {graphs} loaded from inductor's cache, which lacks the modules and lines inside: to "
                "record these, leave TORCHINDUCTOR_FX_GRAPH_CACHE unset in the environment, or set it to 0"
            )
        if self._in_cpp:
            count = len(self._in_cpp)
            graphs = "1 graph allocates" if count == 1 else f"{count} graphs allocate"
            notes.append(f"{COMPILED}: {graphs} in generated C++ (cpp_wrapper): recorded as a whole")
        return notes

    def _hook_lowering(self, module: ModuleType) -> None:
        with self._noting_faults("inductor's cache cannot be set aside: "):
            self._cache.set_aside()
        self._hook(module, "GraphLowering", "compile_to_module", "self", self._add_lowered)

    def _hook_loading(self, module: ModuleType) -> None:
        self._hook(module, "PyCodeCache", "load_by_key_path", "cls", self._add_loaded)

    def _hook(self, module: ModuleType, owner: str, name: str, this: str, leave: Callable[..., None]) -> None:
        """Has a method of inductor's call `leave` with its first argument when it returns.

        The method is recompiled: a wrapper would be a frame in the tracebacks of errors of the job's compilation.
        """
        with self._noting_faults(f"{owner}.{name} is unlike that of supported versions: "):
            function = vars(getattr(module, owner))[name]
            function = getattr(function, "__func__", function)
            before, code = (
                function.__code__,
                recompiled(function, partial(wrap_body, entry=f"{_ENTER}({this})", leave=_EXIT)),
            )
            vars(module).update({_ENTER: self._begin, _EXIT: leave})
            function.__code__ = code
            self._hooked.append((function, before))

    @contextmanager
    def _noting_faults(self, what: str = "") -> Iterator[None]:
        """Keeps what fails inside from reaching the job; regions are then recorded as a whole."""
        try:
            yield
        except Exception as fault:  # noqa: BLE001 - nothing in here may reach the job
            self._fault = f"{what}{type(fault).__name__}: {fault}"

    @staticmethod
    def _begin(this: Any) -> Any:
        return this

    def _add_loaded(self, cache: Any, error: BaseException | None) -> None:
        """Follows a module that inductor has loaded: a wrapper, or one with a kernel's source."""
        if error is not None:
            return
        with self._noting_faults():
            module = cache.modules[-1]
            if _CPP_WRAPPER in vars(module):
                self._in_cpp.add(module)
            elif f"{_ALLOCATING}cpu" in vars(module) and all(each.module() is not module for each in self._known):
                kernels = tuple(cpp_kernels(Path(module.__file__).read_text("utf-8")))
                self._known.append(_Generated(weakref.ref(module), kernels))
                if self._is_on:
                    self._replace(self._known[-1])

    def _add_lowered(self, graph: Any, error: BaseException | None) -> None:
        """Reads where the code of a graph comes from that inductor has just lowered, and loaded last."""
        with self._noting_faults("inductor's cache cannot be set aside: "):
            self._cache.renew()
        with self._noting_faults("settings of the compiler cannot be read: "):
            self._settings.read()
        if error is not None or not self._known:
            return
        with self._noting_faults():
            module = self._known[-1].module()
            if module is None or getattr(graph, "cpp_wrapper", False) or has_origins(module):
                return
            if getattr(graph, "cache_path", module.__file__) != module.__file__:
                return  # its code is no file that was loaded just now
            self._provenance.add(module, graph)
            if not has_origins(module):
                self._fault = "inductor's graphs have no buffers"

    # -- recording ----------------------------------------------------------------------------------------------

    def adopt(self, mode: OperatorMode, rows: OperatorRows) -> None:
        """Supplies the components of a recording, once it begins."""
        self._mode = mode
        self._allocation = allocation_traits(mode.intern)
        self._provenance.adopt(rows)

    def switch_on(self) -> None:
        """Logs what generated code allocates and runs, until `switch_off`."""
        if not self._is_on:
            self._is_on = True
            with self._noting_faults():
                for each in self._known:
                    self._replace(each)

    def switch_off(self) -> None:
        """Restores generated code; its functions in progress run on unlogged."""
        self._is_on = False
        while self._replaced:
            reference, name, original = self._replaced.pop()
            module = reference()
            if module is not None:
                setattr(module, name, original)

    def _replace(self, generated: _Generated) -> None:
        module, mode, allocation = generated.module(), self._mode, self._allocation
        if module is None or mode is None or allocation is None:
            return
        scope = vars(module)
        functions = torch._C._dynamo.guards
        found = [
            (name, allocation)
            for name in scope
            if name.startswith(_ALLOCATING) and scope[name] is getattr(functions, f"_{name}", None)
        ]
        found += [
            (name, kernel_traits(scope[name], name, access, mode.intern))
            for name, access in generated.kernels
            if callable(scope.get(name))
        ]
        for name, traits in found:
            original = scope[name]
            scope[name] = _logged(mode, traits, original)
            self._replaced.append((generated.module, name, original))


def _logged(mode: OperatorMode, traits: OperatorTraits, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of generated code that is logged where the recorder follows the thread."""
    run, is_here = mode.run_generated, mode.is_here

    def call(*args: Any, **kwargs: Any) -> Any:
        if mode.is_on and is_here():
            return run(traits, function, args, kwargs, sys._getframe(1))
        return function(*args, **kwargs)

    skip_compiling(call)
    return call


_CONFIG, _TAG = "torch.compiler.config", "cache_key_tag"
#: Variables with which the user chooses whether graphs are cached.
_VARIABLES = ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE")


class GraphCache:
    """Inductor's caches of lowered graphs, of which none is found while they are set aside.

    Graphs are still written, under keys with a tag of their own: a job may save them (``save_cache_artifacts``). Caches
    of compiled kernels are left alone.
    """

    def __init__(self) -> None:
        self._before: str | None = None
        self._tag = ""

    def set_aside(self) -> None:
        """Gives graphs new keys, unless the environment says which caches to use."""
        before = getattr(sys.modules.get(_CONFIG), _TAG, None)
        if before is not None and not any(variable in os.environ for variable in _VARIABLES):
            self._before = before
            self._change()

    def renew(self) -> None:
        """Gives the next graph another key, so that one equal to an earlier one is lowered too."""
        if self._is_set():
            self._change()

    def restore(self) -> None:
        """Restores the tag, unless the job has set another since."""
        if self._is_set():
            setattr(sys.modules[_CONFIG], _TAG, self._before)
        self._before = None

    def _change(self) -> None:
        self._tag = f"{self._before}memprof-{uuid4().hex}"
        setattr(sys.modules[_CONFIG], _TAG, self._tag)

    def _is_set(self) -> bool:
        return self._before is not None and getattr(sys.modules.get(_CONFIG), _TAG, None) == self._tag
