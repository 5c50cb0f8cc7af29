"""Finds how long local variables of forward, and of its recomputation, hold the storages that operators make.

No operator shows it, and autograd hides it: what is saved for backward lives on anyway. Under checkpointing it does
not, and then a variable decides. The order of the recorded operators and their stacks tell which statements ran; the
source tells which variables these assign, and when a variable is assigned again, deleted or returned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from memprof.trace.assemble.statements import Function, Statement, function_at
from memprof.trace.operator_facts import DETACH, READS_VALUE, are_among
from memprof.trace.schema import NONE, Ints, ModuleCalls, Ops, Stacks, Storages, Uses
from memprof.trace.source_lines import PLACE

#: Where torch calls modules: its functions there only return what a module's forward returns.
_MODULES, _MODULE_CALL = ("/torch/nn/modules/module.py", "\\torch\\nn\\modules\\module.py"), "_call_impl"
#: Results, by the digest of their inputs, so that ranks that run the same are followed once; at most this many.
_MOST_KNOWN = 32
_known: dict[bytes, Ints] = {}
#: Where a callee returned a storage: its position, and the number of values returned; None where that is unknown.
_Place = tuple[int, int] | None


@dataclass(eq=False)
class _Binding:
    """A storage that a statement may have bound to some names: it has, if it is read later or was returned to it."""

    storage: int
    names: frozenset[str]
    line: int
    is_certain: bool


@dataclass(eq=False)
class _Frame:
    """A call of a function that is being followed.

    Attributes:
        code: File and function.
        call: The module call whose forward it is, NONE for other functions.
        function: What its source says; None where it cannot be read.
        line: The line it is at.
        last_op: The last operator under it.
        statement: The statement it is at; None where that neither assigns nor returns.
        results: Storages made or viewed in that statement, with where a callee returned them.
        bindings: Storages bound by earlier statements.
        passed: Storages that it returns as a callee returned them.
    """

    code: tuple[str, str]
    call: int
    function: Function | None
    line: int
    last_op: int = NONE
    statement: Statement | None = None
    results: dict[int, _Place] = field(default_factory=dict)
    bindings: list[_Binding] = field(default_factory=list)
    passed: dict[int, _Place] = field(default_factory=dict)

    def is_at(self, line: int, statement: Statement | None) -> bool:
        """Whether a line belongs to the statement it is at."""
        return statement is self.statement if statement is not None else line == self.line


def held_by_variables(ops: Ops, storages: Storages, uses: Uses, calls: ModuleCalls, stacks: Stacks) -> Ints:
    """Returns the last operator up to which variables of forward hold each storage, NONE for none; ``(storages,)``.

    Args:
        ops: The recorded operators, whose ids are rows.
        storages: The storages, whose ids are rows.
        uses: What the operators use.
        calls: The module calls.
        stacks: The stacks.
    """
    key = _digest(ops, storages, uses, calls, stacks)
    held = _known.pop(key, None)
    if held is None:
        held = _Followed(ops, storages, uses, calls, stacks).held()
    _known[key] = held
    if len(_known) > _MOST_KNOWN:
        _known.pop(next(iter(_known)))
    # A recorded free is the truth: what was followed wrongly must not outlast it.
    freed = np.where(storages.freed_op_id == NONE, len(ops), storages.freed_op_id)
    return np.where(held <= freed, held, NONE)


def forget_held() -> None:
    """Drops the results of earlier ranks: their sources have changed."""
    _known.clear()


def _digest(ops: Ops, storages: Storages, uses: Uses, calls: ModuleCalls, stacks: Stacks) -> bytes:
    """Returns a digest of the inputs: equal for ranks that ran the same operators at the same lines."""
    found = hashlib.blake2b()
    numbers = (
        *(ops.stack_id, ops.is_recompute, storages.created_op_id, storages.storage_id, uses.op_id, uses.storage_id),
        *(calls.first_op_id, calls.last_op_id, calls.parent_call_id, calls.is_recompute, stacks.stack_id),
    )
    for column in numbers:
        found.update(b"%d " % len(column) + column.tobytes())
    for texts in (ops.phase, ops.name, uses.role, stacks.frames):
        found.update("\0".join(map(str, texts.tolist())).encode("utf-8", "surrogatepass") + b"\0\0")
    return found.digest()


class _Followed:
    """Follows the frames of forward from operator to operator."""

    def __init__(self, ops: Ops, storages: Storages, uses: Uses, calls: ModuleCalls, stacks: Stacks) -> None:
        self._held = np.full(len(storages), NONE, dtype=np.int64)
        has_stack = ops.stack_id != NONE
        self._forward = np.flatnonzero((ops.phase == "forward") & ~ops.is_recompute & has_stack).tolist()
        again = np.flatnonzero(ops.is_recompute & has_stack)
        # Within a recomputation, saving tensors detaches them.
        others = np.cumsum(~ops.is_recompute & (ops.name != DETACH))[again]
        self._recomputed = [part.tolist() for part in np.split(again, np.flatnonzero(np.diff(others)) + 1)]
        self._stack_of = ops.stack_id.tolist()
        self._text_of = dict(zip(stacks.stack_id.tolist(), stacks.frames.tolist(), strict=True))
        self._reads_value = are_among(ops.name, READS_VALUE).tolist()
        self._made = _by_op(storages.created_op_id, storages.storage_id, len(ops))
        is_read = uses.role != "write"
        self._read = _by_op(uses.op_id[is_read], uses.storage_id[is_read], len(ops))
        self._calls = _calls_around(calls, len(ops))
        self._parents = calls.parent_call_id.tolist()
        self._places: dict[int, list[tuple[str, str, int]]] = {}
        self._frames: list[_Frame] = []

    def held(self) -> Ints:
        """Returns the last operator up to which a variable holds each storage."""
        for part in (self._forward, *self._recomputed):
            for op in part:
                self._enter(op)
                for frame in self._frames:
                    frame.last_op = op
                self._note(op)
            self._leave(0)
        return self._held

    def _enter(self, op: int) -> None:
        """Ends the frames and statements that the stack of an operator has left, and begins those it has entered."""
        places = list(self._stack(op))
        depth = 0
        while depth < len(places):
            path, name, line, call = places[depth]
            frame = self._frames[depth] if depth < len(self._frames) else None
            if frame is not None and frame.code == (path, name) and frame.call == call:
                statement = _statement(frame.function, line)
                if not frame.is_at(line, statement):
                    self._leave(depth + 1)
                    self._finish(frame)
                    self._drop(frame, line)
                frame.line, frame.statement = line, statement
                depth += 1
                continue
            if frame is not None:
                self._leave(depth)
                caller = self._repeated_caller(depth)
                if caller != NONE:
                    self._leave(caller + 1)
                    self._finish(self._frames[caller])
                    depth = caller + 1
                    continue
            function = function_at(path, line)
            self._frames.append(_Frame((path, name), call, function, line, statement=_statement(function, line)))
            depth += 1
        self._leave(depth)

    def _repeated_caller(self, depth: int) -> int:
        """Returns the frame that calls again in a loop, where a frame has ended below a depth; NONE if there is none.

        The frames between only return what they call.
        """
        caller = depth - 1
        while caller >= 0:
            statement = self._frames[caller].statement
            if statement is None or not (statement.is_return and statement.is_call):
                return caller if statement is not None and statement.is_repeated else NONE
            caller -= 1
        return NONE

    def _note(self, op: int) -> None:
        """Notes what an operator makes, views and reads."""
        made, read = self._made[op], self._read[op]
        is_view = not made and not self._reads_value[op]
        for frame in self._frames:
            for storage in (*made, *(read if is_view else ())):
                frame.results.setdefault(storage, None)
            for binding in frame.bindings:
                binding.is_certain |= binding.storage in read

    def _leave(self, depth: int) -> None:
        """Ends the frames from a depth on, innermost first."""
        while len(self._frames) > depth:
            frame = self._frames.pop()
            self._finish(frame)
            returned = frame.passed
            names = {} if frame.function is None else frame.function.returned
            for binding in frame.bindings:
                places = {place for name in binding.names for place in names.get(name, ())}
                if places and binding.is_certain and binding.storage not in returned:
                    returned[binding.storage] = next(iter(places)) if len(places) == 1 else (0, 1)
                self._release(binding, frame.last_op)
            if self._frames:
                self._frames[-1].results |= returned

    def _finish(self, frame: _Frame) -> None:
        """Ends the statement that a frame is at: its names are bound to its results alone."""
        statement, results = frame.statement, frame.results
        frame.results = {}
        if statement is None:
            return
        if statement.is_return and statement.is_call:
            frame.passed |= {storage: place for storage, place in results.items() if place is not None}
        if not statement.targets:
            return
        assigned = frozenset(name for names in statement.targets for name in names)
        kept = []
        for binding in frame.bindings:
            binding.names -= assigned
            if binding.names:
                kept.append(binding)
            elif binding.storage in results:  # a view of it has the name now
                results.setdefault(binding.storage, None)
            else:
                self._release(binding, frame.last_op)
        frame.bindings = kept + _bound(statement, assigned, results)

    def _drop(self, frame: _Frame, line: int) -> None:
        """Forgets the names that ``del`` has dropped on the way to a line."""
        dropped = {} if frame.function is None else frame.function.dropped
        if not dropped or not frame.bindings:
            return
        kept = []
        for binding in frame.bindings:
            gone = {name for name in binding.names if any(binding.line < at < line for at in dropped.get(name, ()))}
            binding.names -= gone
            if binding.names:
                kept.append(binding)
            else:
                self._release(binding, frame.last_op)
        frame.bindings = kept

    def _release(self, binding: _Binding, op: int) -> None:
        if binding.is_certain:
            self._held[binding.storage] = max(self._held[binding.storage], op)

    def _stack(self, op: int) -> Iterator[tuple[str, str, int, int]]:
        """Yields path, function, line and module call of each frame of an operator, the outermost first.

        The call is that of the module whose forward it is, NONE for other functions.
        """
        number = self._stack_of[op]
        if number not in self._places:
            self._places[number] = _places(str(self._text_of.get(number, "")))
        around: list[int] = []
        call = self._calls[op]
        while call != NONE:
            around.append(call)
            call = self._parents[call]
        places = self._places[number]
        # The innermost module calls of the stack are those of the operator.
        left = sum(name == _MODULE_CALL and path.endswith(_MODULES) for path, name, _ in places)
        call = NONE
        for path, name, line in places:
            if path.endswith(_MODULES):
                if name == _MODULE_CALL:
                    left -= 1
                    call = around[left] if left < len(around) else NONE
            else:
                yield path, name, line, call
                call = NONE


def _bound(statement: Statement, assigned: frozenset[str], results: dict[int, _Place]) -> list[_Binding]:
    positions = statement.targets
    placed = {
        storage: frozenset(positions[place[0]])
        for storage, place in results.items()
        if place is not None and statement.is_call and place[1] == len(positions) > 1
    }
    others = assigned.difference(*placed.values()) or assigned
    found = []
    for storage, place in results.items():
        names = placed.get(storage, assigned if place is not None and len(positions) == 1 else others)
        if names:
            found.append(_Binding(storage, names, statement.last, place is not None and statement.is_call))
    return found


def _statement(function: Function | None, line: int) -> Statement | None:
    return None if function is None else function.statements.get(line)


def _places(text: str) -> list[tuple[str, str, int]]:
    """Returns path, function and line of each frame of a stack, the outermost first, without comprehensions."""
    found = []
    for frame in reversed(text.splitlines()):
        place = PLACE.match(frame)
        if place and (not place["function"].startswith("<") or place["function"] == "<module>"):
            found.append((place["path"], place["function"], int(place["line"])))
    return found


def _by_op(op_ids: Ints, values: Ints, count: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for op, value in zip(op_ids.tolist(), values.tolist(), strict=True):
        if op != NONE:
            found[op].append(value)
    return found


def _calls_around(calls: ModuleCalls, count: int) -> list[int]:
    """Returns the innermost module call around each operator, NONE outside."""
    around = np.full(count, NONE, dtype=np.int64)
    for call in np.flatnonzero(~calls.is_recompute & (calls.first_op_id != NONE)).tolist():
        around[calls.first_op_id[call] : calls.last_op_id[call] + 1] = call
    found: list[int] = around.tolist()
    return found
