"""Operators with which formulas of backward fill fresh zeros.

``gather_backward`` adds into them, ``index_backward`` puts into them, in place on plain tensors. With a dispatch mode
on, and for fake tensors, torch uses operators that return a new tensor instead
(torch/csrc/autograd/FunctionsManual.cpp, areAnyTensorSubclassLike).
"""

from __future__ import annotations

#: Make the zeros.
ZEROS = ("aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default")
#: Fill them, their first argument.
FILLING = (
    *("aten.scatter_add.default", "aten.scatter.src", "aten.index_add.default", "aten.index_put.default"),
    *("aten.masked_scatter.default", "aten.slice_scatter.default"),
)
