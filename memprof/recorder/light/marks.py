"""Where a thread was when: the positions it moved to, by which memory events are attributed afterwards."""

from __future__ import annotations

from bisect import bisect_right

from memprof.trace.files.spool import BACKWARD, OTHER


class Marks:
    """The positions of the observed thread since a session of events began."""

    def __init__(self) -> None:
        """Starts without any."""
        self._ns: list[int] = []
        self._sequence: list[int] = []
        self._place: list[tuple[int, int]] = []
        self._last_node = (-1, -1)  # the mark during which a backward node ran last, and its module

    def __len__(self) -> int:
        """Returns how many there are."""
        return len(self._ns)

    def add(self, now_ns: int, sequence: int, phase: int, module: int) -> None:
        """Adds the position that the thread moves to.

        Args:
            now_ns: When it does.
            sequence: The sequence number that autograd gives the next node.
            phase: The phase.
            module: The module, -1 outside.
        """
        self._ns.append(now_ns)
        self._sequence.append(sequence)
        self._place.append((phase, module))

    def place_of(self, moment_ns: int, node: int) -> tuple[int, int]:
        """Returns the phase and the module of an event.

        Args:
            moment_ns: When it happened; events must come in the order of time.
            node: Sequence number of the backward node that ran it; negative for a node without one, -1 outside nodes.
        """
        here = max(bisect_right(self._ns, moment_ns) - 1, 0)
        phase, module = self._place[here] if self._place else (OTHER, -1)
        if node != -1 and module == -1:  # otherwise a module is recomputed inside backward
            phase = BACKWARD
            if node >= 0:
                maker = bisect_right(self._sequence, node) - 1
                module = self._place[maker][1] if maker >= 0 else -1
                self._last_node = (here, module)
        if module == -1 and self._last_node[0] == here:  # autograd's own work on the node's results
            phase, module = BACKWARD, self._last_node[1]
        return phase, module

    def clear(self) -> None:
        """Forgets all of them."""
        self._ns.clear()
        self._sequence.clear()
        self._place.clear()
        self._last_node = (-1, -1)
