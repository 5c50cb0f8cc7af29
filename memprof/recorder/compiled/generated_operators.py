"""What generated code runs outside of torch's dispatcher, as operators: allocations of buffers, and fused kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from memprof.recorder.calls.operator_traits import OperatorTraits
from memprof.trace.files.spool import FLAG_GENERATED, FLAG_MUTATES

#: Precedes the names of fused kernels among those of operators.
_NAMESPACE = "inductor"
#: Operator that the allocation of a buffer is recorded as.
_EMPTY = torch.ops.aten.empty_strided.default
#: Parameters of a Triton kernel, in its source.
_TRITON_PARAMETERS = re.compile(r"^def triton_\w+\(([^)]*)\)", re.MULTILINE)
#: Those of a C++ kernel, with their types.
_CPP_PARAMETERS = re.compile(r"\bkernel\(([^)]*)\)")
#: A C++ kernel in generated code: its name, the types of its arguments, and its source.
_CPP_KERNEL = re.compile(
    r"^(\w+) = async_compile\.cpp(?:_pybinding)?\(\[([^\]]*)\](?:, r?\'\'\'(.*?)\'\'\')?", re.MULTILINE | re.DOTALL
)


class KernelAccess(NamedTuple):
    """Which arguments a fused kernel writes to.

    Attributes:
        written: Positions of the arguments that it writes to.
        filled: Positions of those among them that it does not read.
    """

    written: frozenset[int]
    filled: frozenset[int]


def allocation_traits(intern: Callable[[str], int]) -> OperatorTraits:
    """Returns what every allocation of a buffer has in common.

    Args:
        intern: Numbers the names of operators.
    """
    traits = OperatorTraits(_EMPTY, intern(str(_EMPTY)))
    traits.flags |= FLAG_GENERATED
    return traits


def kernel_traits(
    kernel: Callable[..., Any], name: str, access: KernelAccess, intern: Callable[[str], int]
) -> OperatorTraits:
    """Returns what every run of a fused kernel has in common."""
    traits = OperatorTraits(kernel, intern(f"{_NAMESPACE}.{name}"))
    traits.mutated, traits.filled = access
    traits.flags = FLAG_MUTATES | FLAG_GENERATED
    return traits


def kernel_access(sources: Sequence[Any]) -> KernelAccess:
    """Returns which arguments a kernel writes to.

    Args:
        sources: What the kernel is compiled from: for C++ the types of its arguments and its source, for Triton its
            name and its source.
    """
    source = next((text for text in reversed(sources) if isinstance(text, str)), "")
    if sources and isinstance(sources[0], list):
        written = frozenset(place for place, kind in enumerate(sources[0]) if "*" in kind and "const " not in kind)
        found = _CPP_PARAMETERS.search(source)
    else:
        found = _TRITON_PARAMETERS.search(source)
        written = frozenset()
    names = [text.split()[-1] if text.split() else "" for text in found[1].split(",")] if found else []
    filled = frozenset(place for place, name in enumerate(names) if name.startswith("out_ptr"))
    updated = frozenset(place for place, name in enumerate(names) if name.startswith("in_out_ptr"))
    return KernelAccess(written or filled | updated, filled)


def cpp_kernels(source: str) -> Iterator[tuple[str, KernelAccess]]:
    """Yields the C++ kernels of generated code: the name of each, and which arguments it writes to."""
    for name, types, text in _CPP_KERNEL.findall(source):
        yield name, kernel_access([[kind.strip(" '\"") for kind in types.split(",")], text])
