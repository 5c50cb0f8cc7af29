"""What generated code runs outside of torch's dispatcher, as operators: allocations of buffers, and fused kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from memprof.recorder.calls.operator_traits import OperatorTraits
from memprof.trace.files.spool import FLAG_GENERATED, FLAG_MUTATES

#: Precedes the names of fused kernels among those of operators.
_NAMESPACE = "inductor"
#: Operator that the allocation of a buffer is recorded as.
_EMPTY = torch.ops.aten.empty_strided.default
#: Parameters of a Triton kernel, in its source.
_TRITON_PARAMETERS = re.compile(r"^def triton_\w+\(([^)]*)\)", re.MULTILINE)
#: A C++ kernel in generated code: its name, and the types of its arguments.
_CPP_KERNEL = re.compile(r"^(\w+) = async_compile\.cpp(?:_pybinding)?\(\[([^\]]*)\]", re.MULTILINE)


def allocation_traits(intern: Callable[[str], int]) -> OperatorTraits:
    """Returns what every allocation of a buffer has in common.

    Args:
        intern: Numbers the names of operators.
    """
    traits = OperatorTraits(_EMPTY, intern(str(_EMPTY)))
    traits.flags |= FLAG_GENERATED
    return traits


def kernel_traits(
    kernel: Callable[..., Any], name: str, written: frozenset[int], intern: Callable[[str], int]
) -> OperatorTraits:
    """Returns what every run of a fused kernel has in common.

    Args:
        kernel: Runs it.
        name: Its name in the generated code.
        written: Positions of the arguments that it writes to.
        intern: Numbers the names of operators.
    """
    traits = OperatorTraits(kernel, intern(f"{_NAMESPACE}.{name}"))
    traits.mutated, traits.flags = written, FLAG_MUTATES | FLAG_GENERATED
    return traits


def written_arguments(sources: Sequence[Any]) -> frozenset[int]:
    """Returns the positions of the arguments that a kernel writes to.

    Args:
        sources: What the kernel is compiled from: for C++ the types of its arguments and its source, for Triton its
            name and its source.
    """
    if sources and isinstance(sources[0], list):
        return frozenset(place for place, kind in enumerate(sources[0]) if "*" in kind and "const " not in kind)
    found = _TRITON_PARAMETERS.search(next((text for text in reversed(sources) if isinstance(text, str)), ""))
    parameters = found[1].split(",") if found else []
    return frozenset(
        place for place, name in enumerate(parameters) if name.strip().startswith(("out_ptr", "in_out_ptr"))
    )


def cpp_kernels(source: str) -> Iterator[tuple[str, frozenset[int]]]:
    """Yields the C++ kernels of generated code: the name of each, and the positions of the arguments it writes to.

    Args:
        source: The code.
    """
    for name, types in _CPP_KERNEL.findall(source):
        yield name, written_arguments([[kind.strip(" '\"") for kind in types.split(",")]])
