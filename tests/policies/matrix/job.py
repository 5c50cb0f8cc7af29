"""A training script that does one thing of the matrix: `python tests/policies/matrix/job.py clipping_by_norm`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.policies.matrix.catalog import usages
from tests.policies.matrix.world import World

if __name__ == "__main__":
    next(usage for usage in usages() if usage.name == sys.argv[1]).run(World())
