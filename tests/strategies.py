"""Random small jobs for property tests, written with ``tests.building``."""

from __future__ import annotations

from hypothesis import strategies as st

from memprof.trace.schema import CATEGORIES, PHASES
from tests.building import Op, Storage

_SIZES = st.one_of(st.integers(0, 2**12), st.integers(2**53, 2**55))  # floats lose bytes above 2**53
_MODULES = st.sampled_from([None, "", "encoder", "encoder.linear", "head"])


@st.composite
def jobs(draw: st.DrawFn, max_steps: int = 3, max_ops: int = 6) -> tuple[list[list[Op]], list[Storage]]:
    """Draws the operators of every step and the storages they name; no step is empty."""
    storages: list[Storage] = []
    alive: list[str] = []

    def bear() -> str:
        category = draw(st.sampled_from([category for category in CATEGORIES if category != "workspace"]))
        storages.append(Storage(f"s{len(storages)}", draw(_SIZES), category, module=draw(_MODULES)))
        return storages[-1].key

    alive += [bear() for _ in range(draw(st.integers(0, 3)))]
    steps = []
    for _ in range(draw(st.integers(1, max_steps))):
        ops: list[Op] = []
        for position in range(draw(st.integers(1, max_ops))):
            touched = draw(st.lists(st.sampled_from(alive), unique=True)) if alive else []
            made = [bear() for _ in range(draw(st.integers(0, 2)))]
            alive += made
            freed = draw(st.lists(st.sampled_from(alive), unique=True)) if alive else []
            ops.append(
                Op(
                    name=draw(st.sampled_from(["aten.mm.default", "aten.relu.default"])),
                    phase=draw(st.sampled_from(PHASES)),
                    module=draw(_MODULES),
                    makes=made,
                    reads=touched,
                    frees=freed,
                    saves=touched[:1],
                    workspace=draw(st.integers(-64, 4096)),
                    forward=draw(st.none() | st.integers(0, position - 1)) if position else None,
                    stack=draw(st.sampled_from(["", "train.py:1:main"])),
                )
            )
            alive = [key for key in alive if key not in freed]
        steps.append(ops)
    return steps, storages
