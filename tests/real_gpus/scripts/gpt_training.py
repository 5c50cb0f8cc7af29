"""Three steps of a job of lab/gpu/jobs from their first allocation on, as a GPU ran it."""

import runpy
import sys
from pathlib import Path

jobs = Path(__file__).parents[3] / "lab" / "gpu" / "jobs"
arguments = ["--size", "small", "--form", "foreach"]
sys.argv = ["with_history.py", "gpu.pickle", str(jobs / "gpt.py"), "--device", "cuda", "--steps", "3", *arguments]
runpy.run_path(str(jobs / "with_history.py"), run_name="__main__")
