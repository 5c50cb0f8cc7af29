"""Decodes the interned texts of a raw recording: names, stacks, tensors and modules by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memprof.trace.files.spool import Spool
from memprof.trace.schema import NONE, Ints, Modules, ReadValues, Stacks, Texts


def listed(spool: Spool, stream: str) -> list[Any]:
    """Returns the interned values of a stream in the order of their numbers."""
    return [text for batch in spool.records.get(stream, []) for text in batch]


def as_texts(values: list[str]) -> Texts:
    """Returns a text column."""
    column = np.empty(len(values), dtype=np.object_)
    column[:] = values
    return column


def look_up(values: list[str], numbers: Ints) -> Texts:
    """Returns the text of each number, "" for NONE."""
    return as_texts([*values, ""])[numbers]


def read_value_table(spool: Spool) -> ReadValues:
    """Lists the values that the job read, without a step of which only some were kept."""
    columns = spool.columns("reads")
    whole = columns["step"] < min(spool.records.get("reads_end", [np.inf]))
    columns = {name: values[whole] for name, values in columns.items()}
    return ReadValues.of(
        step=columns["step"],
        line=look_up(listed(spool, "read_lines"), columns["line"]),
        name=look_up(listed(spool, "names"), columns["name"]),
        previous=look_up(listed(spool, "names"), columns["previous"]),
        elements=columns["elements"],
        value=look_up(listed(spool, "read_values"), columns["value"]),
    )


@dataclass(frozen=True)
class TensorKinds:
    """Shapes, element types and devices by number.

    Attributes:
        shape: Such as 8x128.
        dtype: Such as float32.
        device: Such as cpu.
    """

    shape: list[str]
    dtype: list[str]
    device: list[str]

    def families(self) -> Ints:
        """Numbers the tensor kinds so that those equal in all but their first size match; the last entry is NONE."""
        numbers: dict[tuple[int, str, str], int] = {}
        families = []
        for shape, dtype in zip(self.shape, self.dtype, strict=True):
            key = (shape.count("x") if shape else NONE, shape.partition("x")[2], dtype)
            families.append(numbers.setdefault(key, len(numbers)))
        return np.array([*families, NONE], dtype=np.int64)


def tensor_kinds(spool: Spool) -> TensorKinds:
    """Reads the `tensors` stream."""
    kinds = listed(spool, "tensors")
    return TensorKinds([k[0] for k in kinds], [k[1] for k in kinds], [k[2] for k in kinds])


def module_table(spool: Spool) -> Modules:
    """Names the modules.

    A job's only model keeps its own names (`layers.0.mlp`). Where there are several models, and for loss modules and
    the like next to a model, names start with the root's type, numbered when two roots have the same type.
    """
    records = listed(spool, "modules")
    for number, own_bytes in listed(spool, "module_bytes"):
        records[number] = [*records[number][:4], own_bytes]
    parameter_bytes: dict[int, int] = {}
    types: dict[int, str] = {}
    for root, name, kind, _, own_bytes in records:
        parameter_bytes[root] = parameter_bytes.get(root, 0) + own_bytes
        if not name:
            types[root] = kind
    with_parameters = [root for root, total in parameter_bytes.items() if total]
    sole = with_parameters[0] if len(with_parameters) == 1 else None
    prefixes: dict[int, str] = {}
    taken: dict[str, int] = {}
    for root in sorted(types):
        kind = types[root]
        taken[kind] = taken.get(kind, 0) + 1
        prefixes[root] = "" if root == sole else kind if taken[kind] == 1 else f"{kind}#{taken[kind]}"
    names = [".".join(part for part in (prefixes.get(root, ""), name) if part) for root, name, *_ in records]
    return Modules.of(
        module_id=np.arange(len(records)),
        name=as_texts(names),
        type=as_texts([record[2] for record in records]),
        parent_id=np.array([record[3] for record in records], dtype=np.int64),
        parameter_bytes=np.array([record[4] for record in records], dtype=np.int64),
    )


def stack_table(spool: Spool, used: Ints) -> tuple[Stacks, Ints]:
    """Writes out the stacks that are used, each including its outer part.

    Returns:
        The table, and the row in it of each raw stack number.
    """
    records = listed(spool, "stacks")
    rows = np.full(len(records) + 1, NONE, dtype=np.int64)
    frames_of: dict[int, str] = {}
    texts: dict[str, int] = {}

    def spelled(number: int) -> str:
        chain: list[int] = []
        here = number
        while here >= 0 and here not in frames_of:
            chain.append(here)
            parent = records[here][0]
            if parent >= here:  # an outer part is written before the stacks that extend it
                raise ValueError(f"stack {here} is inside stack {parent}, which comes after it")
            here = parent
        for link in reversed(chain):
            parent, own = records[link]
            frames_of[link] = "\n".join([*own, *([frames_of[parent]] if parent >= 0 else [])])
        return frames_of[number]

    for number in np.unique(used):
        if number >= 0:
            rows[number] = texts.setdefault(spelled(int(number)), len(texts))
    return Stacks.of(stack_id=np.arange(len(texts)), frames=as_texts(list(texts))), rows
