"""Records some steps of the running job for memprof's own use; leaves nothing on disk."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

from memprof.errors import InconclusiveError
from memprof.launch.outcome.output import write_exit, write_launch
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import Target
from memprof.recorder.recorder import Recorder
from memprof.recorder.steps.window import Window
from memprof.trace.store import Trace


class Observed:
    """Steps of the running job, recorded from now on into a temporary folder.

    The step that begins now is skipped, one is recorded, one is timed, and one is left alone; then all hooks are
    removed. The caller marks the ends of steps: other live optimizers may be unrelated to the job.
    """

    def __init__(self) -> None:
        """Starts recording.

        Raises:
            OSError: No space for temporary files.
        """
        gc.collect()  # garbage would be attributed to the job, and be missing from the steps compared with these
        self._folder = Path(tempfile.mkdtemp(prefix="memprof-"))
        self._process = os.getpid()
        self._spool = self._folder / "steps.memprof.spool"
        self._spool.mkdir(mode=0o700)
        window = Window(skip=1, steps=1, plain=1)
        settings = Settings(skip=window.skip, steps=window.steps)
        write_launch(self._spool, Target(arguments=tuple(sys.argv), name=sys.argv[0]), settings)
        self._recorder = Recorder(self._spool / f"process-{self._process}", window, is_late=True)
        self._recorder.install()
        self.end_step()  # starts the first step, and switches the recorder to explicit steps

    @property
    def is_over(self) -> bool:
        """Whether the last of the steps has ended, or recording has failed."""
        return self._recorder.is_closed or bool(self._recorder.failure)

    def end_step(self) -> None:
        """Ends a step."""
        self._recorder.step()

    def read(self) -> Trace:
        """Ends the recording and reads it.

        Raises:
            InconclusiveError: Recording failed.
            BadInputError: Nothing was recorded.
        """
        self._recorder.finish("the observed steps ended")
        if self._recorder.failure:
            raise InconclusiveError(f"recording failed: {self._recorder.failure.strip().splitlines()[-1]}")
        write_exit(self._spool, 0)
        return Trace.open(self._spool)

    def discard(self) -> None:
        """Ends the recording now, and deletes its files."""
        if os.getpid() != self._process:
            return  # a forked child: the files belong to its parent
        self._recorder.finish("no longer needed")
        shutil.rmtree(self._folder, ignore_errors=True)
