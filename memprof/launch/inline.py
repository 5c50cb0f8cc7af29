"""Records part of a script from its own code: `with memprof.record("run.memprof") as recorder:`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from memprof.errors import BadInputError, MemprofError
from memprof.launch import child
from memprof.launch.outcome.output import claim_output, spool_of, write_exit, write_launch
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import Target
from memprof.recorder.light.recorder import LightRecorder
from memprof.recorder.machine import find_rank
from memprof.recorder.recorder import Recorder
from memprof.recorder.steps.window import Window

if TYPE_CHECKING:
    from memprof.trace.files.pack import PackResult

_logger = logging.getLogger("memprof")


class InlineRecording:
    """A recording of the code inside a ``with`` statement, packed into a file at the end.

    It starts at once; steps end with the optimizers' updates, or where `step` is called.
    Inside ``memprof record`` it does nothing: the job is already being recorded.

    Attributes:
        path: The file; this rank's own once recording has started.
        packed: The pack result; None before the end.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        skip: int,
        steps: int,
        force: bool,
        light: bool,
        ends_steps: bool = False,
        keep_arguments: bool = False,
    ) -> None:
        """Prepares a recording; see `record`. With `ends_steps`, the first step ends with `step` as well."""
        self.path = Path(path)
        self._ends_steps = ends_steps
        self._window = Window(skip, steps)
        self._settings = Settings(
            output=self.path,
            force=force,
            quiet=True,
            skip=skip,
            steps=steps,
            light=light,
            keep_arguments=keep_arguments,
        )
        self._recorder: Recorder | LightRecorder | None = None
        self.packed: PackResult | None = None

    @property
    def target(self) -> str:
        """The recorded program's name."""
        return sys.argv[0]

    @property
    def is_active(self) -> bool:
        """Whether the window is open: False before `with`, after the window, and inside memprof record."""
        return self._recorder is not None and not self._recorder.is_closed

    def step(self) -> None:
        """Ends a training step. For loops without a torch optimizer; after the first call, only this ends steps."""
        if self._recorder is not None:
            self._recorder.step()

    def pause(self) -> None:
        """Pauses recording until `resume`, e.g. during evaluation. Call both between two steps."""
        if isinstance(self._recorder, Recorder):
            self._recorder.pause()

    def resume(self) -> None:
        """Resumes after `pause`, at the start of a step."""
        if isinstance(self._recorder, Recorder):
            self._recorder.resume()

    def __enter__(self) -> Self:
        """Starts recording.

        Raises:
            memprof.launch.parent.target.CannotStartError: The file exists already, or cannot be written.
        """
        if child.is_recording():
            _logger.info("this job is already being recorded; %s is not written", self.path)
            return self
        target = Target(arguments=tuple(sys.argv), name=sys.argv[0])
        rank, ranks = find_rank(os.environ)
        # Each rank runs this line with the same path.
        output = claim_output(target, self._settings, f"rank{rank}" if ranks > 1 else "")
        self.path = output
        spool = spool_of(output)
        write_launch(spool, target, self._settings)
        folder = spool.resolve() / f"process-{os.getpid()}"
        if self._settings.light:
            self._recorder = LightRecorder(folder, is_late=True)
        else:
            self._recorder = Recorder(folder, self._window, is_late=True)
        self._recorder.install()
        if self._ends_steps:
            self._recorder.step()  # starts the first step; from then on optimizers end no step
        else:
            self._recorder.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the recording and writes the file. An error of the job propagates unchanged.

        Raises:
            memprof.errors.MemprofError: The file cannot be written, or nothing was recorded; never raised if the job
                itself raised an error.
        """
        if self._recorder is None:
            return
        self._recorder.finish("the recorded block ended", error)
        try:
            self._pack(1 if error is not None else 0)
        except MemprofError as failure:
            if error is None:
                raise
            _logger.warning("%s", failure)

    def abandon(self) -> None:
        """Ends the recording without a file; recorded data stays in the spool folder."""
        if self._recorder is not None:
            self._recorder.finish("given up")

    def _pack(self, status: int) -> None:
        from memprof.trace.files.pack import pack_spool

        assert self._recorder is not None
        spool = spool_of(self.path)
        write_exit(spool, status)
        if self._recorder.failure:
            _logger.warning("the recorder failed:\n%s", self._recorder.failure)
        if not self._recorder.has_operators:
            import shutil

            shutil.rmtree(spool, ignore_errors=True)
            raise BadInputError(f"{self.path} is not written: no operator of torch ran in the recorded block.")
        self.packed = pack_spool(spool, self.path)


def record(
    path: str | os.PathLike[str],
    *,
    steps: int = 3,
    skip: int = 2,
    force: bool = False,
    light: bool = False,
    keep_arguments: bool = False,
) -> InlineRecording:
    """Records the training steps run inside a ``with`` statement.

        with memprof.record("run.memprof", steps=3) as recorder:
            for batch in loader:
                train_step(batch)

    Args:
        path: File to write; each rank of a distributed job writes its own, ``run.rank1.memprof`` for ``run.memprof``.
        steps: Steps to record.
        skip: Steps to skip first.
        force: Overwrite the file if it exists.
        light: Follow every step of the block with a few percent overhead, instead of recording some in full; `steps`
            and `skip` are then ignored.
        keep_arguments: Write the program's arguments unmasked; by default, likely secrets are masked.

    Raises:
        ValueError: `steps` is not positive, or `skip` negative.
    """
    return InlineRecording(path, skip=skip, steps=steps, force=force, light=light, keep_arguments=keep_arguments)
