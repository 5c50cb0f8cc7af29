"""Arrangements as JSON: bytes, microseconds, stable keys."""

from __future__ import annotations

from typing import Any

from memprof.analysis.plans.arrangements import Arrangements, Proposal
from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.planners.arrangement.pipeline import StagePeak
from memprof.planners.arrangement.search import Arranged


def arrangements_to_json(found: Arrangements) -> dict[str, Any]:
    """Returns everything that the page shows, in bytes and microseconds."""
    question, balance = found.question, found.balance
    return {
        "schema": PLAN_SCHEMA,
        "devices": question.cluster.devices,
        "budget_bytes": question.budget_bytes,
        "global_samples": question.samples,
        "tried": found.search.tried,
        "was_stopped": found.search.was_stopped,
        "arrangements": [_proposal(each) for each in found.proposals],
        "nearest": None if found.search.nearest is None else _arranged(found.search.nearest),
        "balance": None
        if balance is None
        else {
            "chosen": _arranged(balance.chosen),
            "equal": _arranged(balance.equal),
            "levelled": _arranged(balance.levelled),
        },
        "assumptions": list(found.assumptions),
    }


def _proposal(one: Proposal) -> dict[str, Any]:
    prediction = None if one.plan is None else one.plan.prediction
    return {
        **_arranged(one.arranged),
        "source": "modelled" if prediction is None else "replayed",
        "replayed_peak_bytes": None if prediction is None else prediction.peak_allocated_bytes,
        "replayed_step_us": None if prediction is None else prediction.step_time_us,
        "not_applied": one.why_not,
        "torch": list(one.calls),
    }


def _arranged(one: Arranged) -> dict[str, Any]:
    ways, times = one.arrangement, one.times
    return {
        "data": ways.data,
        "tensor": ways.tensor,
        "pipeline": ways.pipeline,
        "context": ways.context,
        "expert": ways.expert,
        "zero": ways.zero,
        "micro_batches": ways.micro_batches,
        "samples": ways.samples,
        "schedule": ways.schedule,
        "checkpointed": ways.checkpointed,
        "offloaded": ways.offloaded,
        "split": list(ways.split),
        "peak_bytes": one.peak_bytes,
        "step_us": times.step_us,
        "compute_us": times.compute_us,
        "communication_us": times.communication_us,
        "bubble_us": times.bubble_us,
        "update_us": times.update_us,
        "samples_per_second": one.samples_per_second,
        "stages": [_stage(stage) for stage in one.stages],
    }


def _stage(stage: StagePeak) -> dict[str, Any]:
    return {
        "peak_bytes": stage.peak_bytes,
        "state_bytes": stage.state_bytes,
        "activation_bytes": stage.activation_bytes,
        "held_micro_batches": stage.held,
        "where": stage.where,
        "units": [list(each) for each in stage.units],
    }
