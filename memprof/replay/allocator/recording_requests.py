"""A whole recording's requests to the caching allocator, from a few of its columns."""

from __future__ import annotations

import numpy as np

from memprof.replay.allocator.events import ALLOCATE, Requests, fullest_device, order_requests
from memprof.replay.allocator.steps import StepRequests
from memprof.trace.schema import NONE, Ints, Ops, Storages
from memprof.trace.store import Trace


def requests_of_trace(trace: Trace) -> StepRequests:
    """Lists the requests of a whole recording, each operator once; otherwise as ``steps.requests_of_step``.

    Ten million requests take about 0.4 GB, and 0.7 GB while they are put in order.

    Args:
        trace: The recording of one rank.

    Raises:
        BadInputError: A table is damaged.
    """
    # One column at a time: as read, each takes at least twice its stored size.
    allocated: Ints = trace.columns(Storages, "allocated_bytes")["allocated_bytes"]
    devices = trace.columns(Storages, "device")["device"]
    device = fullest_device(devices, allocated)
    is_owned = allocated > 0
    if device != "cpu":
        is_owned &= devices.codes == np.flatnonzero(devices.distinct == device)[0]
    del allocated, devices
    requested: Ints = trace.columns(Storages, "requested_bytes")["requested_bytes"]
    rows = np.flatnonzero(is_owned & (requested > 0))
    workspace: Ints = trace.columns(Ops, "workspace_bytes")["workspace_bytes"]
    workers = np.flatnonzero(workspace > 0)
    size = np.concatenate([requested[rows], workspace[workers]])
    del is_owned, requested, workspace
    created: Ints = trace.columns(Storages, "created_op_id")["created_op_id"][rows]
    freed: Ints = trace.columns(Storages, "freed_op_id")["freed_op_id"][rows]
    kind, about, moment = order_requests(created, freed, workers)
    del freed
    made_by = np.concatenate([created, workers])
    base = np.flatnonzero(created == NONE)
    del created
    streams: Ints = trace.columns(Ops, "stream")["stream"]
    stream = np.where(made_by == NONE, 0, streams[made_by]) if len(streams) else np.zeros(len(made_by), dtype=np.int64)
    return StepRequests(
        requests=Requests(
            kind=np.concatenate([np.full(len(base), ALLOCATE, dtype=np.int8), kind]),
            allocation=np.concatenate([base.astype(np.int32), about]),
            size=size,
            stream=stream,
            owner=np.zeros(len(size), dtype=np.int32),
        ),
        steady_from=len(base),
        op_id=np.concatenate([np.full(len(base), NONE), moment]),
        storage_id=np.concatenate([rows, np.full(len(workers), NONE)]),
        made_by=made_by,
        device=device,
    )
