"""Per-operator properties: written arguments, randomness, and whether it can be repeated."""

from __future__ import annotations

from typing import Any

import torch

from memprof.recorder.calls.higher_order import is_higher_order

#: Normalisations that update running statistics, with the positions of those arguments, and of the argument that
#: says whether they are in training, None if they always are.
_STATISTICS = {
    "native_batch_norm": (3, 4, 5),
    "_native_batch_norm_legit": (3, 4, 5),
    "_batch_norm_with_update": (3, 4, None),
    "cudnn_batch_norm": (3, 4, 5),
    "miopen_batch_norm": (3, 4, 5),
}
#: Operators that replace a tensor's memory; their results are not tracked further.
_MOVING = ("set_", "resize_", "resize_as_", "_resize_output_", "record_stream")
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


class Operator:
    """One overload of an operator.

    Attributes:
        function: The operator.
        name: Its name in recordings.
        is_view: Whether it allocates nothing: it returns views of its arguments, or marks a region for profilers.
        written: Positions of the arguments that it writes.
        written_names: Names of its written keyword arguments.
        changes: Position of the one tensor that it changes in place and returns; -1 for other operators.
        is_random: Whether it draws random numbers.
        statistics: Positions of running statistics, and of the argument that says whether they are updated.
        can_repeat: Whether its outputs can be recomputed by running it again.
        is_higher_order: Whether it runs functions rather than only operating on tensors.
    """

    __slots__ = (
        "can_repeat",
        "changes",
        "function",
        "is_higher_order",
        "is_random",
        "is_view",
        "name",
        "statistics",
        "written",
        "written_names",
    )

    def __init__(self, function: Any) -> None:
        """Reads an operator's schema."""
        self.function = function
        self.name = str(function)
        self.is_higher_order = is_higher_order(function)
        schema = getattr(function, "_schema", None)
        arguments = schema.arguments if schema is not None else []
        writes = [(i, a) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.written = tuple(i for i, a in writes if not a.kwarg_only)
        self.written_names = tuple(a.name for _, a in writes)
        returns = schema.returns if schema is not None else []
        self.is_random = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
        packet = getattr(getattr(function, "overloadpacket", None), "__name__", "")
        namespace = getattr(function, "namespace", "")
        returns_views = bool(returns) and not writes and all(each.alias_info is not None for each in returns)
        # The end of a region also runs while an error passes through it, which another error must not replace.
        self.is_view = returns_views or namespace == "profiler"
        self.statistics = _STATISTICS.get(packet) if namespace == "aten" else None
        is_in_place = (
            len(writes) == 1
            and not writes[0][1].kwarg_only
            and len(returns) == 1
            and str(writes[0][1].type) == "Tensor"
            and packet not in _MOVING
        )
        self.changes = writes[0][0] if is_in_place else -1
        self.can_repeat = (
            schema is not None
            and (not writes or is_in_place or self.statistics is not None)
            and namespace not in _COLLECTIVES
            and packet not in _MOVING
        )

    def moves_statistics(self, args: tuple[Any, ...]) -> bool:
        """Returns whether a call updates running statistics."""
        if self.statistics is None:
            return False
        flag = self.statistics[2]
        return flag is None or (len(args) > flag and bool(args[flag]))
