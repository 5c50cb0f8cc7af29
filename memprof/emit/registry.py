"""All targets that plans are emitted in."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memprof.emit.emission import Target

#: Target names, for the command line.
TARGETS = ("pytorch", "fsdp2", "deepspeed", "hf", "lightning", "torchtitan", "trl", "axolotl", "ms-swift")


@cache
def target_named(name: str) -> Target:
    """Returns the target with a name, one of TARGETS."""
    from memprof.emit.targets.deepspeed import DeepSpeed
    from memprof.emit.targets.hf import HuggingFace
    from memprof.emit.targets.lightning import Lightning
    from memprof.emit.targets.pytorch import Fsdp2, PyTorch
    from memprof.emit.targets.torchtitan import TorchTitan
    from memprof.emit.targets.yaml_trainers import Axolotl, MsSwift, Trl

    kinds = (PyTorch, Fsdp2, DeepSpeed, HuggingFace, Lightning, TorchTitan, Trl, Axolotl, MsSwift)
    known: dict[str, type[Target]] = {kind.name: kind for kind in kinds}
    return known[name]()
