"""Follows the types of the variables of a function through its source, from statement to statement."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache

from memprof.trace.assemble.source.statements import own_nodes, parse_function
from memprof.trace.source_lines import lines_of

#: Types of an expression: float32, that of a weight, that of an argument of the function to which it was cast, another,
#: or that of a value that is not a tensor.
FLOAT32, WEIGHT, ARGUMENT, OTHER, _PLAIN = "float32", "weight", "argument", "other", "plain"
CHOSEN = (FLOAT32, WEIGHT)
_TO_FLOAT32 = ("float", "double")
_FLOAT32_TYPES = tuple(f"torch.{name}" for name in ("float32", "float", "float64", "double"))
_SHORT_TYPES = tuple(f"torch.{name}" for name in ("float16", "half", "bfloat16"))
_TO_OTHERS = ("type_as", "half", "bfloat16")
_CASTS = ("to", "type", *_TO_OTHERS)
#: Autocast runs these in the short type, whatever they are given.
_PRODUCTS = ("matmul", "mm", "bmm", "baddbmm", "addmm", "einsum", "linear", "scaled_dot_product_attention")
#: With a ``dtype`` these make a tensor of it, and cast none.
_FACTORIES = ("zeros", "ones", "full", "empty", "arange", "tensor", "rand", "randn", "linspace", "eye")

#: Arguments in such a type: position or name, and the type.
Given = frozenset[tuple[int | str, str]]


@dataclass(eq=False)
class FunctionTypes:
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
    given: dict[tuple[int, str], Given] = field(default_factory=dict)
    casts_back: bool = False
    makes_like: set[int] = field(default_factory=set)
    casts_like: set[int] = field(default_factory=set)


@cache
def read_types(path: str, first: int, last: int, given: Given, on_device: bool) -> FunctionTypes:
    """Returns what the source of a function says; nothing where it cannot be parsed.

    Args:
        path: Its file.
        first: The lines of the file before it.
        last: Its last line.
        given: Its arguments in a type that the caller's code chooses.
        on_device: Whether it ran on a GPU, where code that looks whether autocast is on finds that it is.
    """
    definition = parse_function(path, first, last)
    if definition is None:
        return FunctionTypes()
    try:
        return _Reader(definition, path, first, given, on_device).read
    except RecursionError:  # generated code, such as a sum of a thousand terms
        return FunctionTypes()


class _Reader:
    """Follows the types of a function's variables from statement to statement."""

    def __init__(
        self,
        definition: ast.FunctionDef | ast.AsyncFunctionDef,
        path: str,
        before: int,
        given: Given,
        on_device: bool,
    ) -> None:
        self.read = FunctionTypes()
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
                self._types |= {one.id: OTHER for one in target.elts if isinstance(one, ast.Name)}
        for line in (self._before + line for line in _lines_of(statement)):
            self.read.lines[line] = _single(set(self._computes) - {_PLAIN})
            self.read.modules[line] = _single(self._modules - {OTHER})
            self.read.calls |= {(line, name): _single(kinds) for name, kinds in self._called.items()}

    def _type(self, node: ast.expr) -> str:
        """Returns the type of an expression, and notes what it computes."""
        if isinstance(node, ast.Name):
            return self._types.get(node.id, OTHER)
        if isinstance(node, ast.Constant | ast.Attribute):
            return _PLAIN
        if isinstance(node, ast.Subscript | ast.Starred):
            return self._type(node.value)
        if isinstance(node, ast.Call):
            return self._type_of_call(node)
        if isinstance(node, ast.BinOp | ast.UnaryOp):
            operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
            kind = _widest(*map(self._type, operands))
            self._computes.append(OTHER if isinstance(node.op, ast.MatMult) else kind)
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
            return FLOAT32
        target = self._target(node)
        if is_method and name in _CASTS:
            self.read.casts_back |= target == OTHER and receiver in CHOSEN
            if self._casts_like(node):
                self.read.casts_like.update(self._before + line for line in _lines_of(node))
            if target == OTHER and receiver == OTHER and self._names_argument(node):
                return ARGUMENT
            return receiver if target == _PLAIN else target
        kind = _widest(receiver, *kinds.values())
        if kind == OTHER and ARGUMENT in (receiver, kinds.get(0)):  # others are settings: dropout(x, p=rate)
            kind = ARGUMENT
        if name in _FACTORIES and any(_is_type_of_variable(word.value) for word in node.keywords):
            self.read.makes_like.update(self._before + line for line in _lines_of(node))
        if name in _PRODUCTS or name.startswith("conv"):
            kind = OTHER
        elif target in CHOSEN and name not in _FACTORIES:
            if is_own:  # a function of the job's that casts its argument, and computes nothing
                return target
            kind = target
        elif is_own and kind in CHOSEN:
            given = frozenset((key, one) for key, one in kinds.items() if one in CHOSEN)
            self.read.given |= {(self._before + line, name): given for line in _lines_of(node)}
            if not self._is_defined(name):
                self._modules.add(kind)
                kind = OTHER
        elif is_own and kind == ARGUMENT and not self._is_defined(name):
            self._modules.add(kind)
        if not is_own:  # the operators of a function or a module of the job's are under a frame of its own
            self._computes.append(kind)
        self._called.setdefault(name, set()).add(kind)
        return kind

    def _target(self, node: ast.Call) -> str:
        """Returns the type that a call is told to cast to; _PLAIN for none."""
        if _name_of(node) in _TO_OTHERS:
            return OTHER
        for value in (*node.args, *(word.value for word in node.keywords if word.arg == "dtype")):
            text = ast.unparse(value)
            if text in _FLOAT32_TYPES:
                return FLOAT32
            if text.endswith(".weight.dtype"):
                return WEIGHT if self._follows_weights else OTHER
            if text.endswith("dtype") or text in _SHORT_TYPES:
                return OTHER
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
    return next((kind for kind in (*CHOSEN, OTHER, ARGUMENT) if kind in kinds), _PLAIN)


def _single(kinds: set[str]) -> str:
    return next(iter(kinds)) if len(kinds) == 1 else OTHER


def _lines_of(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _is_library(node: ast.expr) -> bool:
    return ast.unparse(node) in ("torch", "F", "nn.functional", "torch.nn.functional")
