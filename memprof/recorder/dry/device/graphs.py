"""CUDA graphs of a dry run: captures allocate from the graph's pool, which is kept, and replays run nothing."""

from __future__ import annotations

from typing import Any

from memprof.recorder.dry.device.current import CURRENT


class CUDAGraph:
    """A graph of which only the memory is simulated.

    What is allocated during its capture is in a pool that is never released to the device, as replays write to it. It
    is not executed again: a replay takes no memory.
    """

    _pool: tuple[int, int] | None = None
    _is_captured = False

    def __new__(cls, keep_graph: bool = False) -> CUDAGraph:
        """Makes an empty graph."""
        return super().__new__(cls)

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        """Allocates from a pool from now on.

        Args:
            pool: Its identifier; a new one if omitted.
            capture_error_mode: Has no effect.
            check_input_liveness: Has no effect.

        Raises:
            RuntimeError: A graph is being captured.
        """
        chosen = CURRENT.new_pool() if pool is None else tuple(pool)
        CURRENT.capture_into(chosen)
        self._pool = chosen

    def capture_end(self) -> None:
        """Ends the capture.

        Raises:
            RuntimeError: None has begun.
        """
        CURRENT.end_capture()
        self._is_captured = True

    def instantiate(self) -> None:
        """Does nothing: nothing is executed."""

    def replay(self) -> None:
        """Takes no memory.

        Raises:
            RuntimeError: Nothing was captured.
        """
        if not self._is_captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")

    def reset(self) -> None:
        """Forgets the capture; its pool is kept."""
        self._is_captured = False

    def pool(self) -> tuple[int, int]:
        """Returns the identifier of its pool.

        Raises:
            RuntimeError: Nothing was captured.
        """
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def enable_debug_mode(self) -> None:
        """Has no effect: a dry run builds no graph."""

    def debug_dump(self, debug_path: str) -> None:
        """Has no effect: a dry run builds no graph."""

    def get_graph_data(self) -> dict[str, Any]:
        """Returns an empty dictionary: a dry run builds no graph."""
        return {}

    def raw_cuda_graph(self) -> int:
        """Returns no handle: 0."""
        return 0

    def raw_cuda_graph_exec(self) -> int:
        """Returns no handle: 0."""
        return 0
