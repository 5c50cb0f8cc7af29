"""An estimate compared with a recording of the same training: the settings read from it, and the error of each term."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from memprof.analysis.estimate.estimate import Estimate
from memprof.analysis.estimate.model import Model
from memprof.analysis.estimate.network import Network
from memprof.analysis.estimate.transformer import Transformer
from memprof.analysis.plans.basis import basis_of
from memprof.analysis.report.moments import find_category_maxima
from memprof.analysis.report.saved import SavedStorages, find_saved
from memprof.errors import InconclusiveError
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE, Modules, read_shape
from memprof.trace.step import Step
from memprof.trace.store import Trace

#: Optimizers by a state key unique to each.
_BY_STATE = {"exp_avg_sq": "adamw", "momentum_buffer": "momentum", "row_var": "adafactor"}

_PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class RecordedSetting:
    """Training settings read from a recording, each None where it cannot be determined.

    Attributes:
        batch: Samples per call of the model.
        length: Tokens of a sample.
        precision: Name of the dtype of most parameters.
        optimizer: Name of the optimizer.
        is_on_cpu: Whether it ran on the CPU.
        ranks: Ranks of the job.
    """

    batch: int | None
    length: int | None
    precision: str | None
    optimizer: str | None
    is_on_cpu: bool
    ranks: int


@dataclass(frozen=True)
class Compared:
    """One part of an estimate compared with the recording.

    Attributes:
        name: The part: a group of terms, or the peak as well.
        estimated_bytes: By formula.
        recorded_bytes: As recorded.
        what: The recorded quantity it is compared with, a clause.
    """

    name: str
    estimated_bytes: int
    recorded_bytes: int
    what: str

    @property
    def error_bytes(self) -> int:
        """Estimated less recorded bytes."""
        return self.estimated_bytes - self.recorded_bytes

    @property
    def error_ratio(self) -> float | None:
        """The error as a share of the recorded bytes, None where nothing was recorded."""
        return self.error_bytes / self.recorded_bytes if self.recorded_bytes else None


def read_setting(trace: Trace, model: Model) -> RecordedSetting:
    """Reads the training settings of a job from its recording.

    Raises:
        InconclusiveError: It contains no complete step.
    """
    step = basis_of(trace).step
    storages = step.storages
    is_parameter = storages.category == "parameter"
    dtypes = Counter[str]()
    for dtype, size in zip(storages.dtype[is_parameter], storages.allocated_bytes[is_parameter], strict=True):
        dtypes[str(dtype)] += int(size)
    states = {str(name).rpartition(".")[2] for name in storages.name[storages.category == "optimizer_state"]}
    batch, length = _batch(step, model)
    return RecordedSetting(
        batch=batch,
        length=length,
        precision=_PRECISION.get(dtypes.most_common(1)[0][0]) if dtypes else None,
        optimizer=next((name for key, name in _BY_STATE.items() if key in states), None if states else "sgd"),
        is_on_cpu=not step.is_on_device(),
        ranks=max(trace.manifest.world_size, 1),
    )


def compare(found: Estimate, trace: Trace) -> tuple[Compared, ...]:
    """Compares an estimate with the fullest step of a recording.

    Raises:
        InconclusiveError: It contains no complete step, or no parameters.
    """
    step = basis_of(trace).step
    maxima = {name: one.maximum_bytes for name, one in find_category_maxima(step).items()}
    if "parameter" not in maxima:
        raise InconclusiveError(
            f"{trace.path} contains no parameters to compare with: record the job with memprof record."
        )
    groups = found.by_group
    rows = [
        Compared("weights", groups["weights"], maxima["parameter"], "parameters"),
        Compared("gradients", groups["gradients"], maxima.get("gradient", 0), "gradients, at their maximum"),
        Compared("optimizer", groups["optimizer"], maxima.get("optimizer_state", 0), "optimizer state"),
    ]
    rows += [] if isinstance(found.model.shape, int) else _kept_rows(found, step)
    peak = int(live_bytes(step).during.max(initial=0))
    return (
        *rows,
        Compared(
            "fullest moment", found.fullest_bytes, peak, "the step's peak, where gradients are freed before forward"
        ),
        Compared("all terms", found.total_bytes, peak, "the step's peak, where they are not"),
    )


def _kept_rows(found: Estimate, step: Step) -> list[Compared]:
    """Compares saved tensors: the layers' and the ends' separately where the recording distinguishes them."""
    saved = find_saved(step)
    is_data = step.storages.category[saved.rows] == "input"
    sizes = np.where(is_data, 0, saved.bytes)
    groups, total = found.by_group, int(sizes.sum())
    inside = _is_in_layers(found.model, step.modules, saved)
    what = "saved for backward, without input data"
    if inside is None:
        return [Compared("activations and ends", found.kept_bytes, total, what)]
    mine = int(sizes[inside].sum())
    return [
        Compared("activations", groups["activations"], mine, f"{what}: in the layers"),
        Compared("ends", groups["ends"], total - mine, f"{what}: outside them"),
    ]


def _is_in_layers(model: Model, modules: Modules, saved: SavedStorages) -> np.ndarray | None:
    """Returns which saved storages belong to a transformer's layers; None where the recording does not show them."""
    if not isinstance(model.shape, Transformer):
        return None
    kinds = Counter(zip(modules.parent_id.tolist(), modules.type.tolist(), strict=True))
    found = [key for key, times in kinds.items() if times == model.shape.layers and key[0] != NONE]
    if not found:
        return None
    # If several groups match in number, such as norms in a separate list, the layers are the one with the most bytes.
    layers = max((_below(modules, *key) for key in found), key=lambda rows: int(modules.parameter_bytes[rows].sum()))
    return np.isin(saved.module_id, layers)


def _below(modules: Modules, parent: int, kind: str) -> np.ndarray:
    """Returns the modules of one type under a parent, and all their descendants."""
    is_in = (modules.parent_id == parent) & (modules.type == kind)
    while True:
        grown = is_in | (np.isin(modules.parent_id, np.flatnonzero(is_in)) & (modules.parent_id != NONE))
        if (grown == is_in).all():
            return np.flatnonzero(is_in)
        is_in = grown


def _batch(step: Step, model: Model) -> tuple[int | None, int | None]:
    """Reads batch and length from the inputs saved for backward: token ids or images."""
    saved = find_saved(step)
    storages = step.storages
    for row in saved.rows[storages.category[saved.rows] == "input"]:
        sizes = read_shape(storages.shape[row])
        is_numbers = str(storages.dtype[row]) == "int64"
        if isinstance(model.shape, Transformer) and is_numbers and len(sizes) == 2:
            return sizes[0], sizes[1]
        if isinstance(model.shape, Network) and not is_numbers and len(sizes) == len(model.shape.sample) + 1:
            return sizes[0], None
    return None, None
