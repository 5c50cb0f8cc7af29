"""Finds operators that the job's source runs in float32, or in the type of a weight, whatever the type of the model.

In a step recorded in float32 such a cast does nothing, so no operator shows it. The source does:
``x = x.to(torch.float32)``, ``softmax(x, dtype=torch.float32)``, ``self.normalize(x.float())``,
``x.to(layer.weight.dtype)``; and whether the function casts back what it has computed: ``.to(query.dtype)``,
``.type_as(x)``.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from memprof.trace.assemble.source.statements import own_nodes, parse_function
from memprof.trace.schema import NONE, Ops, Stacks
from memprof.trace.source_lines import PLACE, function_around, is_of_torch, lines_of

#: Types of an expression: float32, that of a weight, that of an argument of the function to which it was cast, another,
#: or that of a value that is not a tensor.
_FLOAT32, _WEIGHT, _ARGUMENT, _OTHER, _PLAIN = "float32", "weight", "argument", "other", "plain"
_CHOSEN = (_FLOAT32, _WEIGHT)
#: Of a stack: that of some other tensor.
_LIKE = "like"
_TO_FLOAT32 = ("float", "double")
_FLOAT32_TYPES = tuple(f"torch.{name}" for name in ("float32", "float", "float64", "double"))
_SHORT_TYPES = tuple(f"torch.{name}" for name in ("float16", "half", "bfloat16"))
_TO_OTHERS = ("type_as", "half", "bfloat16")
_CASTS = ("to", "type", *_TO_OTHERS)
#: Autocast runs these in the short type, whatever they are given.
_PRODUCTS = ("matmul", "mm", "bmm", "baddbmm", "addmm", "einsum", "linear", "scaled_dot_product_attention")
#: With a ``dtype`` these make a tensor of it, and cast none.
_FACTORIES = ("zeros", "ones", "full", "empty", "arange", "tensor", "rand", "randn", "linspace", "eye")
#: In stacks: where torch calls a module, and a module of torch that calls others.
_MODULE_CALL, _CONTAINER = "_wrapped_call_impl", "container.py"

#: Arguments in such a type: position or name, and the type.
_Given = frozenset[tuple[int | str, str]]


@dataclass(frozen=True)
class OwnTypes:
    """Stacks, by their ids, whose operators run in a type that the job's code chooses.

    Attributes:
        float32: They run in float32.
        weight: They run in the type of a weight.
        casts_back: Of both, those whose results the code casts back.
        made_like: They make a tensor in the type of another, which no floating point tensor is read for:
            ``torch.zeros(n, dtype=x.dtype)``, ``is_token.to(x.dtype)``.
        in_argument: They read what the function has cast to the type of one of its arguments: ``x.type(value.dtype)``.
    """

    float32: tuple[int, ...]
    weight: tuple[int, ...]
    casts_back: tuple[int, ...]
    made_like: tuple[int, ...]
    in_argument: tuple[int, ...]


@dataclass(frozen=True)
class _Found:
    """What the source says of a stack's operators.

    Attributes:
        kind: The type in which they run.
        casts_back: Whether their results are cast back.
        casts_like: Whether the statement casts to the type of a variable.
    """

    kind: str = _OTHER
    casts_back: bool = False
    casts_like: bool = False


@dataclass(eq=False)
class _Read:
    """What a function's source says, for given arguments.

    Attributes:
        lines: The type in which a statement computes alone, by its lines.
        calls: The type in which calls of a function compute, by the lines of the statement and its name.
        modules: The type that a module is given, by the lines of the statement.
        given: What a function is given, by the lines of the statement and its name.
        casts_back: Whether it casts something from such a type to that of something else.
        makes_like: Lines of statements that make tensors in the type of others.
        casts_like: Lines of statements that cast to the type of others.
    """

    lines: dict[int, str] = field(default_factory=dict)
    calls: dict[tuple[int, str], str] = field(default_factory=dict)
    modules: dict[int, str] = field(default_factory=dict)
    given: dict[tuple[int, str], _Given] = field(default_factory=dict)
    casts_back: bool = False
    makes_like: set[int] = field(default_factory=set)
    casts_like: set[int] = field(default_factory=set)


def find_own_types(ops: Ops, stacks: Stacks, *, on_device: bool) -> OwnTypes:
    """Returns which stacks run in a type that the job's code chooses.

    Args:
        ops: The recorded operators.
        stacks: Their stacks.
        on_device: Whether they ran on a GPU, where code that looks whether autocast is on finds that it is.
    """
    used = set(np.unique(ops.stack_id[ops.stack_id != NONE]).tolist())
    found = {
        number: _type_of(str(frames), on_device)
        for number, frames in zip(stacks.stack_id.tolist(), stacks.frames.tolist(), strict=True)
        if number in used
    }
    return OwnTypes(
        tuple(sorted(number for number, one in found.items() if one.kind == _FLOAT32)),
        tuple(sorted(number for number, one in found.items() if one.kind == _WEIGHT)),
        tuple(sorted(number for number, one in found.items() if one.casts_back and one.kind in _CHOSEN)),
        tuple(sorted(number for number, one in found.items() if one.kind == _LIKE or one.casts_like)),
        tuple(sorted(number for number, one in found.items() if one.kind == _ARGUMENT)),
    )


def forget_types() -> None:
    """Drops what was read of functions."""
    _read.cache_clear()


def _type_of(frames: str, on_device: bool) -> _Found:
    """Returns what the source says of a stack's operators."""
    lines = frames.splitlines()
    depth = next((number for number, frame in enumerate(lines) if not is_of_torch(frame)), len(lines))
    own = [place for frame in lines[depth:] if not is_of_torch(frame) and (place := PLACE.match(frame))]
    if not own:
        return _Found()
    path, line, name = own[0]["path"], int(own[0]["line"]), own[0]["function"]
    given: _Given = frozenset()
    casts_back = False
    if len(own) > 1:
        caller = _read(own[1]["path"], *function_around(own[1]["path"], int(own[1]["line"])), frozenset(), on_device)
        given = caller.given.get((int(own[1]["line"]), name), frozenset())
        casts_back = bool(given) and caller.casts_back
    read = _read(path, *function_around(path, line), given, on_device)
    kind = _LIKE if line in read.makes_like else read.lines.get(line, _OTHER)
    called = PLACE.match(lines[depth - 1]) if depth else None
    if called is not None:
        kind = read.calls.get((line, called["function"]), kind)
        if called["function"] == _MODULE_CALL and not any(_CONTAINER in frame for frame in lines[:depth]):
            kind = read.modules.get(line, kind)
    return _Found(kind, casts_back=casts_back or read.casts_back, casts_like=line in read.casts_like)


@cache
def _read(path: str, first: int, last: int, given: _Given, on_device: bool) -> _Read:
    definition = parse_function(path, first, last)
    if definition is None:
        return _Read()
    try:
        return _Reader(definition, path, first, given, on_device).read
    except RecursionError:  # generated code, such as a sum of a thousand terms
        return _Read()


class _Reader:
    """Follows the types of a function's variables from statement to statement."""

    def __init__(
        self,
        definition: ast.FunctionDef | ast.AsyncFunctionDef,
        path: str,
        before: int,
        given: _Given,
        on_device: bool,
    ) -> None:
        self.read = _Read()
        self._path, self._before = path, before
        names = [argument.arg for argument in (*definition.args.posonlyargs, *definition.args.args)]
        names = names[1:] if names[:1] == ["self"] else names
        self._arguments = [*names, *(argument.arg for argument in definition.args.kwonlyargs)]
        self._types = {names[key] if isinstance(key, int) else key: kind for key, kind in given if _fits(key, names)}
        nodes = own_nodes(definition.body)
        self._follows_weights = not (on_device and any(_name_of(node) == "is_autocast_enabled" for node in nodes))
        statements = [node for node in nodes if isinstance(node, ast.stmt)]
        for statement in sorted(statements, key=lambda node: node.lineno):
            self._follow(statement)

    def _follow(self, statement: ast.stmt) -> None:
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return | ast.Expr):
            return
        self._computes: list[str] = []
        self._called: dict[str, set[str]] = {}
        self._modules: set[str] = set()
        kind = _PLAIN if statement.value is None else self._type(statement.value)
        if isinstance(statement, ast.AugAssign):
            kind = _widest(kind, self._type(statement.target))
            self._computes.append(kind)
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name):
                self._types[target.id] = kind
            elif isinstance(target, ast.Tuple):
                self._types |= {one.id: _OTHER for one in target.elts if isinstance(one, ast.Name)}
        for line in (self._before + line for line in _lines_of(statement)):
            self.read.lines[line] = _single(set(self._computes) - {_PLAIN})
            self.read.modules[line] = _single(self._modules - {_OTHER})
            self.read.calls |= {(line, name): _single(kinds) for name, kinds in self._called.items()}

    def _type(self, node: ast.expr) -> str:
        """Returns the type of an expression, and notes what it computes."""
        if isinstance(node, ast.Name):
            return self._types.get(node.id, _OTHER)
        if isinstance(node, ast.Constant | ast.Attribute):
            return _PLAIN
        if isinstance(node, ast.Subscript | ast.Starred):
            return self._type(node.value)
        if isinstance(node, ast.Call):
            return self._type_of_call(node)
        if isinstance(node, ast.BinOp | ast.UnaryOp):
            operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
            kind = _widest(*map(self._type, operands))
            self._computes.append(_OTHER if isinstance(node.op, ast.MatMult) else kind)
            return self._computes[-1]
        return _single({self._type(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)})

    def _type_of_call(self, node: ast.Call) -> str:
        name, owner = _name_of(node), node.func.value if isinstance(node.func, ast.Attribute) else None
        is_own = owner is None or (isinstance(owner, ast.Name) and owner.id == "self")
        is_method = owner is not None and not is_own and not _is_library(owner)
        receiver = self._type(owner) if owner is not None and is_method else _PLAIN
        kinds: dict[int | str, str] = {place: self._type(value) for place, value in enumerate(node.args)}
        kinds |= {word.arg: self._type(word.value) for word in node.keywords if word.arg}
        if is_method and name in _TO_FLOAT32:
            return _FLOAT32
        target = self._target(node)
        if is_method and name in _CASTS:
            self.read.casts_back |= target == _OTHER and receiver in _CHOSEN
            if self._casts_like(node):
                self.read.casts_like.update(self._before + line for line in _lines_of(node))
            if target == _OTHER and receiver == _OTHER and self._names_argument(node):
                return _ARGUMENT
            return receiver if target == _PLAIN else target
        kind = _widest(receiver, *kinds.values())
        if kind == _OTHER and _ARGUMENT in (receiver, kinds.get(0)):  # others are settings: dropout(x, p=rate)
            kind = _ARGUMENT
        if name in _FACTORIES and any(_is_type_of_variable(word.value) for word in node.keywords):
            self.read.makes_like.update(self._before + line for line in _lines_of(node))
        if name in _PRODUCTS or name.startswith("conv"):
            kind = _OTHER
        elif target in _CHOSEN and name not in _FACTORIES:
            if is_own:  # a function of the job's that casts its argument, and computes nothing
                return target
            kind = target
        elif is_own and kind in _CHOSEN:
            given = frozenset((key, one) for key, one in kinds.items() if one in _CHOSEN)
            self.read.given |= {(self._before + line, name): given for line in _lines_of(node)}
            if not self._is_defined(name):
                self._modules.add(kind)
                kind = _OTHER
        elif is_own and kind == _ARGUMENT and not self._is_defined(name):
            self._modules.add(kind)
        if not is_own:  # the operators of a function or a module of the job's are under a frame of its own
            self._computes.append(kind)
        self._called.setdefault(name, set()).add(kind)
        return kind

    def _target(self, node: ast.Call) -> str:
        """Returns the type that a call is told to cast to; _PLAIN for none."""
        if _name_of(node) in _TO_OTHERS:
            return _OTHER
        for value in (*node.args, *(word.value for word in node.keywords if word.arg == "dtype")):
            text = ast.unparse(value)
            if text in _FLOAT32_TYPES:
                return _FLOAT32
            if text.endswith(".weight.dtype"):
                return _WEIGHT if self._follows_weights else _OTHER
            if text.endswith("dtype") or text in _SHORT_TYPES:
                return _OTHER
        return _PLAIN

    def _casts_like(self, node: ast.Call) -> bool:
        """Returns whether a cast is to the type of a variable: ``.type(x.dtype)``, ``.type_as(x)``."""
        if _name_of(node) == "type_as":
            return bool(node.args) and isinstance(node.args[0], ast.Name)
        return any(map(_is_type_of_variable, node.args)) or any(
            word.arg == "dtype" and _is_type_of_variable(word.value) for word in node.keywords
        )

    def _names_argument(self, node: ast.Call) -> bool:
        """Returns whether a cast is to the type of one of the function's arguments."""
        given = [*node.args, *(word.value for word in node.keywords if word.arg == "dtype")]
        names = [value if _name_of(node) == "type_as" else getattr(value, "value", None) for value in given]
        return any(isinstance(name, ast.Name) and name.id in self._arguments for name in names)

    def _is_defined(self, name: str) -> bool:
        """Returns whether the file defines a function of that name, rather than a module being called."""
        return any(text.lstrip().startswith(f"def {name}(") for text in lines_of(self._path))


def _is_type_of_variable(value: ast.expr) -> bool:
    """Returns whether an argument is ``x.dtype``."""
    return isinstance(value, ast.Attribute) and value.attr == "dtype" and isinstance(value.value, ast.Name)


def _fits(key: int | str, names: list[str]) -> bool:
    return key < len(names) if isinstance(key, int) else key in names


def _name_of(node: ast.AST) -> str:
    """Returns the name of the function that a call calls, without what it is an attribute of; "" for other nodes."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _widest(*kinds: str) -> str:
    """Returns the type of what is computed from operands of some types."""
    return next((kind for kind in (*_CHOSEN, _OTHER, _ARGUMENT) if kind in kinds), _PLAIN)


def _single(kinds: set[str]) -> str:
    return next(iter(kinds)) if len(kinds) == 1 else _OTHER


def _lines_of(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _is_library(node: ast.expr) -> bool:
    return ast.unparse(node) in ("torch", "F", "nn.functional", "torch.nn.functional")
