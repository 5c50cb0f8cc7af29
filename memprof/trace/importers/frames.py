"""Stacks of a snapshot: keeps Python frames, and derives operators, phases and calls of modules."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memprof.trace.operator_facts import ABOVE_CUBLAS
from memprof.trace.schema import NONE, Stacks

#: C++ frames have no file, or one of these; Python's are .py files and names such as <frozen runpy>.
_CPP_FILE = re.compile(
    r"^(?:\?\?)?$|\.(?:c|cc|cpp|cxx|cu|cuh|h|hpp|hxx|inl|s|o|so(?:\.\d+)*|pyd|dll|pyx)$", re.IGNORECASE
)
_OPERATOR = re.compile(r"^at::_ops::(\w+?)::(?:call|redispatch)\b")
_BACKWARD_CPP = re.compile(
    r"^(?:\S+ )?torch::autograd::(?:Engine|Node|PyNode|AccumulateGrad|python::PythonEngine|generated)\b"
)
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_CUBLAS = re.compile(r"^at::cuda::get(?:CurrentCUDABlas\w*Handle|New\w*Workspace|CUDABlas\w*Workspace)\b")
_ALLOCATOR = "CUDACachingAllocator::"
_TORCH_FILE = re.compile(
    r"[/\\](?:site|dist)-packages[/\\](?:torch|functorch)[/\\]|[/\\]torch[/\\](?:nn|optim|autograd)[/\\]"
)
_LIBRARY_FILE = re.compile(
    rf"{_TORCH_FILE.pattern}|^<frozen |[/\\]lib(?:64)?[/\\]python3\.\d+t?[/\\](?!(?:site|dist)-packages[/\\])"
)
_BACKWARD_PYTHON = re.compile(
    r"[/\\]torch[/\\](?:autograd[/\\]__init__\.py:(?:backward|grad|_make_grads)|autograd[/\\]graph\.py:_engine_run_backward"
    r"|_tensor\.py:backward)$"
)
_APPLY_PYTHON = re.compile(r"[/\\]torch[/\\]autograd[/\\]function\.py:apply$")
_OPTIMIZER_FILE = re.compile(r"[/\\]torch[/\\]optim[/\\]")
_WEIGHTS_FILE = re.compile(r"[/\\]torch[/\\]nn[/\\](?:modules[/\\]|parameter\.py$|init\.py$)")
#: A frame of a traceback as text; line numbers of more digits are none.
_FORMATTED = re.compile(r'File "([^"\n]+)", line (\d{1,9}), in ([^\n]+)')
_MODULE_FILE = re.compile(r"[/\\]torch[/\\]nn[/\\]modules[/\\]module\.py$")


@dataclass(frozen=True)
class ModuleFrame:
    """The frame in which a module's code runs, usually its ``forward``.

    Attributes:
        file: Its file.
        line: The line that runs in it.
        function: Its function.
        site: The frames that led to it from the module around it, the outermost first, each as file, line and function.
    """

    file: str
    line: int
    function: str
    site: tuple[str, ...]


@dataclass(frozen=True)
class Stack:
    """Information derived from one stack.

    Attributes:
        stack_id: Its row in the table, in backward that of the forward's stack where the file has it; NONE if it has no
            Python frame, as C++ frames are not kept.
        operator: The torch operator that Python called, such as ``aten.mul_Tensor``; "" if there is none.
        function: The innermost Python function outside torch, or else the innermost one; "" without any.
        place: File, line and function of that frame, "" without any.
        phase: ``forward``, ``backward``, ``optimizer``, or "" if unknown.
        is_python: It has a Python frame of its own.
        makes_gradient: It assigns a gradient.
        makes_state: It initialises optimizer state.
        makes_workspace: It gives a handle of cuBLAS its workspace; None where that depends on the size.
        makes_weights: A module's own code runs in it, which moves or initialises its parameters.
        modules: The modules that run, the outermost first.
    """

    stack_id: int = NONE
    operator: str = ""
    function: str = ""
    place: str = ""
    phase: str = ""
    is_python: bool = False
    makes_gradient: bool = False
    makes_state: bool = False
    makes_workspace: bool | None = None
    makes_weights: bool = False
    modules: tuple[ModuleFrame, ...] = ()


@dataclass(frozen=True)
class _Frame:
    text: str
    function: str
    file: str
    line: int
    is_python: bool
    is_library: bool
    operator: str
    marks: str  # a letter for the phase the frame indicates
    fx: str = ""  # its node in a graph of torch.fx


NO_STACK = Stack()

#: Modules in a stack that are looked at; a deeper nesting is a recursion.
MOST_MODULES = 64

#: What torch adds to the frames of code that torch.fx generated.
_FX_KEYS = ("fx_node_op", "fx_node_name", "fx_original_trace")


class StackTable:
    """Interns stacks. Frames are shared hundreds of thousands of times, so each is parsed once."""

    def __init__(self) -> None:
        self._frames: dict[int, _Frame] = {}
        self._kept: list[Any] = []  # keeps frames alive, so that ids stay unique
        self._stacks: dict[tuple[int, ...], Stack] = {}
        self._rows: dict[tuple[str, str], int] = {}
        self._forwards: dict[tuple[str, ...], Stack] = {}

    def stack(self, frames: Any) -> Stack:
        """Returns the information of a list of frames, innermost first; malformed frames are kept as text."""
        if not isinstance(frames, list) or not frames:
            return NO_STACK
        key = tuple(map(id, frames))
        found = self._stacks.get(key)
        if found is None:
            found = self._stacks[key] = self._read(frames)
        return found

    def stacks(self, frames: Sequence[Any]) -> list[Stack]:
        """Returns the information of each of many lists of frames."""
        known, found = self._stacks, []
        last, stack = None, NO_STACK
        for one in frames:
            if one is not last:  # both entries of a free share one list
                last = one
                seen = known.get(tuple(map(id, one))) if type(one) is list else NO_STACK
                stack = self.stack(one) if seen is None else seen
            found.append(stack)
        return found

    def made(self, frames: list[Any], operator: str, phase: str) -> Stack:
        """Returns the stack of frames, given an operator and a phase known from elsewhere."""
        stack = self._read(frames) if frames else NO_STACK
        operator = operator or stack.operator
        return replace(stack, operator=operator, phase=phase or stack.phase, makes_workspace=_workspace("", operator))

    def with_forward(self, stack: Stack, lines: Any) -> Stack:
        """Returns a stack of backward with the place of the forward that it belongs to."""
        key = tuple(map(text_of, lines if isinstance(lines, list) else ()))
        if key not in self._forwards:
            found = [match for text in key for match in _FORMATTED.findall(text)]
            frames = [{"filename": file, "line": int(line), "name": name} for file, line, name in reversed(found)]
            self._forwards[key] = self._read(frames) if frames else NO_STACK
        forward = self._forwards[key]
        if forward is NO_STACK:
            return stack
        function, phase = stack.function or forward.function, stack.phase or "backward"
        return replace(stack, stack_id=forward.stack_id, place=forward.place, function=function, phase=phase)

    @property
    def read(self) -> Sequence[Any]:
        """The distinct frames read so far, as loaded."""
        return self._kept

    def table(self) -> Stacks:
        """Returns the distinct stacks."""
        return Stacks.of(
            stack_id=range(len(self._rows)),
            frames=[frames for frames, _ in self._rows],
            fx_nodes=[nodes for _, nodes in self._rows],
        )

    def _read(self, frames: list[Any]) -> Stack:
        read = [self._frame(frame) for frame in frames]
        python = [frame for frame in read if frame.is_python]
        own = [frame for frame in python if not frame.is_library]
        text = "\n".join(frame.text for frame in python), "\n".join(frame.fx for frame in read if frame.fx)
        # The operator that Python called is the outermost C++ frame before the first Python frame.
        first = next((place for place, frame in enumerate(read) if frame.is_python), len(read))
        operators = [frame.operator for frame in read[:first] if frame.operator]
        shown = next(iter(own or python), None)
        marks = "".join(frame.marks for frame in read)
        # Every other thread's outermost frame is a script's, or one of Python's own that starts threads.
        if python and _TORCH_FILE.search(python[-1].file) and python[-1].function != "<module>":
            marks += "b"
        return Stack(
            stack_id=self._rows.setdefault(text, len(self._rows)) if python else NONE,
            operator=operators[-1] if operators else "",
            function="" if shown is None else shown.function,
            place="" if shown is None else shown.text,
            phase=_phase(marks),
            is_python=bool(python),
            makes_gradient="g" in marks,
            makes_state="s" in marks,
            makes_workspace=_workspace(marks, operators[-1] if operators else ""),
            makes_weights=any(_WEIGHTS_FILE.search(frame.file) for frame in python),
            modules=_modules(python),
        )

    def _frame(self, frame: Any) -> _Frame:
        found = self._frames.get(id(frame))
        if found is None:
            self._kept.append(frame)
            found = self._frames[id(frame)] = _read_frame(frame)
        return found


def _phase(marks: str) -> str:
    """Returns the phase of frames, innermost first: backward, then optimizer unless a module runs inside it.

    A stack that begins in torch is on an autograd thread, such as a Function's backward, a hook, or what checkpointing
    computes again; in forward, the user's code encloses it.
    """
    if "b" in marks:
        return "backward"
    if "o" in marks:
        # A closure passed to step() runs the model inside the optimizer.
        return "forward" if "f" in marks[: marks.index("o")] else "optimizer"
    return "forward" if "f" in marks else ""


def _workspace(marks: str, operator: str) -> bool | None:
    """Returns whether frames are cuBLAS's: those of the allocator lie above its, and another operator has none."""
    if "w" in marks:
        return True
    is_other = "c" in marks or (operator and not ABOVE_CUBLAS.match(operator))
    return False if is_other else None


def _modules(python: list[_Frame]) -> tuple[ModuleFrame, ...]:
    """Returns the calls of modules in Python frames, innermost first as they are, outermost first as returned.

    A call is two frames of torch's ``Module``; what runs in it is the next ``forward`` inside, or, where a hook or a
    decorator calls it by another name, the next frame outside torch. The outermost may also be called by its name.
    """
    found: list[ModuleFrame] = []
    begun = 0  # the outermost frame that led to the next call
    outermost_first = python[::-1]
    for place, frame in enumerate(outermost_first):
        if "f" not in frame.marks:
            by_name = frame.function == "forward" and not frame.is_library
            if by_name and not found and "a" not in outermost_first[place - 1].marks:
                site = tuple(one.text for one in outermost_first[:place])
                found.append(ModuleFrame(frame.file, frame.line, frame.function, site))
                begun = place
            continue
        inside = []
        for one in outermost_first[place + 1 :]:
            if one.function in ("_wrapped_call_impl", "_call_impl") and _MODULE_FILE.search(one.file):
                break
            inside.append(one)
        callee = next((one for one in inside if one.function == "forward"), None) or next(
            (one for one in inside if not one.is_library), None
        )
        if callee is not None:
            site = tuple(one.text for one in outermost_first[begun:place])
            found.append(ModuleFrame(callee.file, callee.line, callee.function, site))
            begun = place + 1 + inside.index(callee)
    return tuple(found[:MOST_MODULES])


def _read_frame(frame: Any) -> _Frame:
    if not isinstance(frame, dict):
        return _Frame(_line(text_of(frame)), "", "", 0, is_python=False, is_library=False, operator="", marks="")
    file, function, line = text_of(frame.get("filename")), text_of(frame.get("name")), frame.get("line", 0)
    if _CPP_FILE.search(file):
        operator = _OPERATOR.match(function)
        marks = "b" if _BACKWARD_CPP.match(function) else ""
        marks += "g" if _ACCUMULATE in function else ""
        marks += "w" if _CUBLAS.search(function) else "c" if _ALLOCATOR in function else ""
        name = f"aten.{operator[1]}" if operator else ""
        text = _line(f"{file}:{_number(line)}:{function}")
        return _Frame(text, function, file, _number(line), False, False, name, marks)
    return _Frame(
        text=_line(f"{file}:{_number(line)}:{function}"),
        function=_line(function),
        file=_line(file),
        line=_number(line),
        is_python=True,
        is_library=_LIBRARY_FILE.search(file) is not None,
        operator="",
        marks=_python_marks(file, function),
        fx=_line(" ".join(text for text in map(text_of, map(frame.get, _FX_KEYS)) if text)),
    )


def _python_marks(file: str, function: str) -> str:
    place = f"{file}:{function}"
    if _BACKWARD_PYTHON.search(place):
        return "b"
    if _APPLY_PYTHON.search(place):
        return "a"
    if _OPTIMIZER_FILE.search(file):
        return "os" if function == "_init_group" else "o"
    return "f" if _MODULE_FILE.search(file) and function == "_call_impl" else ""


def text_of(value: Any) -> str:
    """Returns a text unchanged and "" for anything else: lists in a hostile file can be too long to format."""
    return value if type(value) is str else ""


def metadata_text(value: Any) -> str:
    """Formats metadata: a text as it is, a dictionary as JSON, as torch does, without what is nested in it."""
    if type(value) is not dict:
        return text_of(value)
    flat = {
        key: one
        for key, one in value.items()
        if type(key) is str and (type(one) in (str, int, bool) or (type(one) is float and math.isfinite(one)))
    }
    return json.dumps(flat, separators=(",", ":"))


def _number(line: Any) -> int:
    return line if type(line) is int and line >= 0 else 0


def _line(text: str) -> str:
    """Returns a text on one line: a stack is stored as lines."""
    return text if text.isprintable() else " ".join(text.splitlines())
