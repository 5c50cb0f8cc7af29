"""Pieces of Python code for policies, and how they are combined into one module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memprof.policies.plan.patterns import WHOLE, as_expression

_WIDTH = 110
_STANDARD = ("contextlib", "dataclasses", "functools", "itertools", "os", "re", "tempfile", "threading", "weakref")


@dataclass(frozen=True)
class Code:
    """The code of one policy.

    Attributes:
        imports: Import statements, a line each.
        helpers: Definitions, each the text of a function, a class or a constant.
        calls: Statements of a function with parameter ``model``, and ``optimizer`` where ``needs_optimizer``.
        needs_optimizer: Whether the statements need the optimizer.
        notes: What differs from memprof, or is left to the reader.
    """

    imports: tuple[str, ...] = ()
    helpers: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    needs_optimizer: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Function:
    """A function of the generated module.

    Attributes:
        signature: ``prepare(model, optimizer)``.
        docstring: A single sentence.
        body: Its statements.
    """

    signature: str
    docstring: str
    body: tuple[str, ...]


def module_text(docstring: Sequence[str], codes: Iterable[Code], functions: Iterable[Function]) -> str:
    """Builds a module: docstring, imports, helpers, and the functions for the reader to call.

    Args:
        docstring: Its lines.
        codes: Its parts, in the order in which policies are applied; shared helpers are included once.
        functions: The functions, in reading order.
    """
    codes = list(codes)
    helpers = list(dict.fromkeys(helper.strip("\n") for code in codes for helper in code.helpers))
    head = "\n".join(docstring)
    opening = 'r"""' if "\\" in head else '"""'
    blocks = [f'{opening}{head}\n"""']
    blocks.append(_imports(line for code in codes for line in code.imports))
    constants = [each for each in helpers if not each.startswith(("def ", "class ", "@"))]
    text = "\n\n".join(block for block in (*blocks, *constants) if block)
    definitions = [each for each in helpers if each not in constants]
    for function in functions:
        body = "\n".join(f"    {line}" if line else "" for part in function.body for line in part.split("\n"))
        definitions.append(f'def {function.signature}:\n    """{function.docstring}"""\n{body}')
    return "\n\n\n".join((text, *definitions)) + "\n"


def _imports(lines: Iterable[str]) -> str:
    """Sorts imports: standard library first, whole modules before ``from`` imports."""
    known: dict[str, set[str]] = {}
    whole: set[str] = set()
    for line in lines:
        module, _, names = line.removeprefix("from ").partition(" import ")
        if line.startswith("from "):
            known.setdefault(module, set()).update(name.strip() for name in names.split(","))
        else:
            whole.add(line)
    made = [*sorted(whole), *(f"from {name} import {', '.join(sorted(known[name]))}" for name in sorted(known))]
    sections: list[list[str]] = [[], [], []]
    for line in made:
        root = line.split()[1].split(".")[0]
        sections[0 if root in _STANDARD else 2 if root == "memprof" else 1].append(line)
    return "\n\n".join("\n".join(section) for section in sections if section)


def expressions(patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns module name patterns as regular expressions; the whole model is the empty one."""
    return tuple("" if pattern in WHOLE else as_expression(pattern) for pattern in patterns)


def call(function: str, *arguments: str) -> str:
    """Formats a call, over several lines where it is long."""
    line = f"{function}({', '.join(arguments)})"
    if len(line) <= _WIDTH:
        return line
    inner = "\n".join(f"    {line}" for argument in arguments for line in f"{argument},".split("\n"))
    return f"{function}(\n{inner}\n)"


def text_of(text: str) -> str:
    """Formats a string as a literal, raw where it has backslashes."""
    is_simple = text.isprintable() and '"' not in text
    if is_simple and "\\" not in text:
        return f'"{text}"'
    return f'r"{text}"' if is_simple and not text.endswith("\\") else repr(text)


def list_of(texts: Sequence[str]) -> str:
    """Formats strings as a list, over several lines where it is long."""
    line = f"[{', '.join(map(text_of, texts))}]"
    if len(line) <= _WIDTH - 30:
        return line
    inner = "\n".join(f"    {text_of(text)}," for text in texts)
    return f"[\n{inner}\n]"


#: Finds modules by their names.
MODULES = '''
def _modules(model, patterns):
    """Returns the modules whose qualified names match one of the regular expressions, by name."""
    found = {}
    for name, module in model.named_modules():
        # The model itself is "", which a pattern with a wildcard does not mean.
        if any(re.fullmatch(each, name) and (name or not each) for each in patterns):
            found[name] = module
    for each in patterns:
        if not any(re.fullmatch(each, name) for name in found):
            raise ValueError(f"No module of this {type(model).__name__} matches {each!r}.")
    return found
'''
MODULES_IMPORTS = ("import re",)
