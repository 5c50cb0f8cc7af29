"""What observes a thread's operators and memory, opened and closed together."""

from __future__ import annotations

import torch

from memprof.recorder.calls.untraced import untraced
from memprof.recorder.compiled.generated_modules import GeneratedModules
from memprof.recorder.memory.inventory import Inventory
from memprof.recorder.operators import OperatorMode
from memprof.recorder.profiler.sources import MemorySources
from memprof.recorder.profiler.timed import OperatorTimes


class Sessions:
    """The dispatch mode with the sources of memory events, and the timer of steps without them.

    Attributes:
        mode: Logs operators.
        sources: Log memory events.
        times: Logs operator times.
        is_late: Tensors were allocated while the allocator's table was off.
    """

    def __init__(
        self,
        mode: OperatorMode,
        sources: MemorySources,
        times: OperatorTimes,
        inventory: Inventory,
        generated: GeneratedModules | None,
        *,
        is_late: bool,
    ) -> None:
        """Stores the observers, all off.

        Args:
            mode: Logs operators.
            sources: Log memory events.
            times: Logs operator times.
            inventory: States what is held when events begin.
            generated: The code that torch.compile has generated; None in a dry run, which follows it in its own way.
            is_late: Tensors were allocated before the allocator's table was enabled.
        """
        self.mode = mode
        self.sources = sources
        self.times = times
        self.is_late = is_late
        # Threads of gloo hold a collective's tensors for a while, and native events lack what such a thread frees; the
        # allocator's count shows it, unless tensors of before are missing from that count.
        self._is_uncounted = is_late
        self._inventory = inventory
        self._generated = generated

    def open(self) -> None:
        """Starts logging operators and memory events, if they are off; existing allocations are written first."""
        if self.sources.is_open:
            return
        self.sources.start()
        self.mode.begin_epoch(self.sources.on_output, self.sources.follow_on_cpu if self._is_uncounted else None)
        with torch._C.DisableTorchFunction(), untraced():
            self._inventory.held(self.sources.follow if self.is_late else self.sources.remember)
        self.is_late = False  # from now on every allocation is in the allocator's table, which reports its free
        self.mode.slide_in()
        if self._generated is not None:
            self._generated.switch_on()

    def close(self) -> None:
        """Stops logging operators and memory events."""
        self.close_operators()
        self.sources.stop()

    def close_operators(self) -> None:
        """Stops logging operators; also possible inside backward."""
        self._leave_generated()
        if self.mode.is_on:
            self.mode.slide_out()

    def abandon(self) -> None:
        """Stops everything without logging: after a fault, or in a forked child."""
        self._leave_generated()
        self.mode.slide_out()
        self.sources.abandon()
        self.times.abandon()

    def make_way(self) -> bool:
        """Stops logging operators and memory events for the job's own profiler; returns whether they were on."""
        if self.sources.is_open:
            self.close()
            return True
        if self.mode.is_here():  # removed inside backward, and put back by the engine when backward ended
            self.mode.slide_out()
        return False

    def _leave_generated(self) -> None:
        if self._generated is not None:
            self._generated.switch_off()
