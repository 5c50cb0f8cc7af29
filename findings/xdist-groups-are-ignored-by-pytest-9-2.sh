#!/usr/bin/env bash
# pytest 9.2.0 with pytest-xdist 3.8.0: the group of a test (`xdist_group`, with `--dist loadgroup`) is ignored without
# a word. xdist writes the group into an attribute of each test, `_nodeid`, from which pytest no longer reads its name.
# Four tests of one group, which share a module's fixture, run in two workers, and each makes the fixture anew; with
# pytest 9.1.1 one worker runs all four. Seen on 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >test_group.py <<'PY'
import os
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("one")


@pytest.fixture(scope="module")
def shared():
    Path(f"made-{os.getpid()}").touch()


@pytest.mark.parametrize("number", range(4))
def test_uses_it(shared, number):
    time.sleep(1)
PY
for version in 9.1.1 9.2.0; do
    python3 -m venv "venv-$version"
    "venv-$version/bin/python" -m pip install --quiet --disable-pip-version-check "pytest==$version" pytest-xdist==3.8.0
    rm -f made-*
    "venv-$version/bin/python" -m pytest -q -p no:cacheprovider -n 2 --dist loadgroup test_group.py >output
    grep -q "4 passed" output
    echo "pytest $version: the fixture of one group was made $(ls made-* | wc -l) times"
done | tee seen
diff - seen <<'SEEN'
pytest 9.1.1: the fixture of one group was made 1 times
pytest 9.2.0: the fixture of one group was made 2 times
SEEN
