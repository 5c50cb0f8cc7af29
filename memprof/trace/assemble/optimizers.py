"""Optimizers and their state."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from memprof.trace.assemble import texts
from memprof.trace.files.spool import Spool
from memprof.trace.schema import NONE, Optimizers


def optimizer_table(spool: Spool) -> Optimizers:
    """Lists the optimizers; where one has several records, the last one counts."""
    last: dict[int, dict[str, Any]] = {}
    for batch in spool.records.get("optimizers", []):
        last.update({record["number"]: record for record in batch})
    records = [last[number] for number in sorted(last)]
    shapes = [[shape for group in record["groups"] for shape in group["parameters"]] for record in records]
    full = [full_state_bytes(record["algorithm"], record["groups"], record["scalar_bytes"]) for record in records]
    return Optimizers.of(
        optimizer_id=list(range(len(records))),
        name=texts.as_texts([record["name"] for record in records]),
        settings=texts.as_texts([_settings(record) for record in records]),
        parameters=[sum(times for _, _, times in each) for each in shapes],
        parameter_bytes=[sum(times * item * math.prod(sizes) for sizes, item, times in each) for each in shapes],
        elements=[sum(times * math.prod(sizes) for sizes, _, times in each) for each in shapes],
        state_bytes=[record["state_bytes"] for record in records],
        full_state_bytes=[NONE if each is None else each for each in full],
        updates=[record["updates"] for record in records],
    )


def _settings(record: dict[str, Any]) -> str:
    groups = record["groups"]
    return json.dumps(groups[0]["settings"] if groups else {}, sort_keys=True)


#: Bytes of one parameter's state, from its sizes, element bytes, scalar bytes and the group's settings.
Formula = Callable[[tuple[int, ...], int, int, dict[str, Any]], int]


# Bytes of state that each of torch's own optimizers creates in its first update, exact to the byte.
#
# Source: torch/optim/*.py of torch 2.13, the ``_init_group`` of each class: state is created with ``zeros_like`` of the
# parameter (or a copy of its gradient), plus a scalar tensor per parameter (``step``).


def _elements(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _copies(count: int, scalars: int, *also_if: str) -> Formula:
    """Returns the formula for a number of tensors like the parameter, one more per enabled setting, and scalars."""

    def state_bytes(sizes: tuple[int, ...], item: int, scalar: int, settings: dict[str, Any]) -> int:
        tensors = count + sum(bool(settings.get(name)) for name in also_if)
        # A fused kernel counts its steps in float32, whatever the default type.
        width = 4 if settings.get("fused") else scalar
        return tensors * _elements(sizes) * item + scalars * width

    return state_bytes


def _adafactor(sizes: tuple[int, ...], item: int, scalar: int, settings: dict[str, Any]) -> int:
    """Returns the state of a factored optimizer: row and column variances of a matrix, the full size otherwise."""
    if len(sizes) < 2:
        return _elements(sizes) * item + scalar
    rows, columns = _elements(sizes[:-1]), _elements((*sizes[:-2], sizes[-1]))
    return (rows + columns) * item + scalar


FORMULAS: dict[str, Formula] = {
    "torch.optim.sgd.SGD": _copies(0, 0, "momentum"),  # momentum_buffer
    "torch.optim.adam.Adam": _copies(2, 1, "amsgrad"),  # exp_avg, exp_avg_sq, max_exp_avg_sq, step
    "torch.optim.adamw.AdamW": _copies(2, 1, "amsgrad"),
    "torch.optim.rmsprop.RMSprop": _copies(1, 1, "momentum", "centered"),  # square_avg, momentum_buffer, grad_avg
    "torch.optim.adagrad.Adagrad": _copies(1, 1),  # sum, created with the optimizer
    "torch.optim.adadelta.Adadelta": _copies(2, 1),  # square_avg, acc_delta
    "torch.optim.nadam.NAdam": _copies(2, 2),  # exp_avg, exp_avg_sq, step, mu_product
    "torch.optim.radam.RAdam": _copies(2, 1),  # exp_avg, exp_avg_sq
    "torch.optim.adamax.Adamax": _copies(2, 1),  # exp_avg, exp_inf
    "torch.optim.asgd.ASGD": _copies(1, 3),  # ax, step, eta, mu
    "torch.optim.rprop.Rprop": _copies(2, 1),  # prev, step_size
    "torch.optim._adafactor.Adafactor": _adafactor,
    "torch.optim._muon.Muon": _copies(1, 0),  # momentum_buffer
    "torch.optim.sparse_adam.SparseAdam": _copies(2, 0),  # exp_avg, exp_avg_sq; step is a Python number
}


def full_state_bytes(algorithm: str, groups: list[dict[str, Any]], scalar_bytes: int) -> int | None:
    """Returns the bytes of an optimizer's state once every parameter has been updated.

    Args:
        algorithm: Class whose ``step`` it runs, with its module.
        groups: Its parameter groups: ``settings``, and ``parameters`` as [sizes, bytes of an element, count].
        scalar_bytes: Bytes of a scalar of torch's default type.

    Returns:
        The bytes; None for an unknown class, or one whose state has no fixed size (LBFGS keeps a history).
    """
    formula = FORMULAS.get(algorithm)
    if formula is None:
        return None
    total = 0
    for group in groups:
        for sizes, item, times in group["parameters"]:
            total += int(times) * formula(tuple(sizes), item, scalar_bytes, group["settings"])
    return total
