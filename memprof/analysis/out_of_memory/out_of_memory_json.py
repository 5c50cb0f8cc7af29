"""The post-mortem of a job that ran out of memory as JSON containers: stable keys, bytes as numbers."""

from __future__ import annotations

from memprof.analysis.out_of_memory.post_mortem import PostMortem
from memprof.json_values import Json, to_json


def post_mortem_to_json(found: PostMortem) -> Json:
    """Returns a post-mortem ready for ``json.dump``."""
    held = found.held
    return {
        "rank": found.rank,
        "failures": found.failures,
        "caught": found.is_caught,
        "device": found.device,
        "step": found.step,
        "phase": found.phase or None,
        "op": found.op or None,
        "module": found.module,
        "source": None if found.source is None else found.source.place,
        "message": found.message,
        "requested_bytes": found.requested_bytes,
        "allocated_bytes": found.allocated_bytes,
        "reserved_bytes": found.reserved_bytes,
        "cached_bytes": found.cached_bytes,
        "largest_free_bytes": found.largest_free_bytes,
        "free_bytes": found.free_bytes,
        "total_bytes": found.total_bytes,
        "fragmented": found.is_fragmented,
        "room": None
        if found.room is None
        else {**to_json(found.room), "is_fragmented": found.room.is_fragmented, "short_bytes": found.room.short_bytes},
        "held": None
        if held is None
        else {
            "bytes": held.total_bytes,
            "by_category": {str(part.key): part.bytes for part in held.by_category.parts},
            "by_module": [
                {"module": None if part.key is None else held.tree.title(part.key), "bytes": part.bytes}
                for part in held.by_module.parts
            ],
            "by_line": [
                {"line": None if part.key is None else part.key.place, "bytes": part.bytes}
                for part in held.by_source.parts
            ],
            "largest": [
                {
                    "bytes": one.allocated_bytes,
                    "category": one.category,
                    "name": one.name or None,
                    "shape": one.shape or None,
                    "module": one.module,
                    "source": None if one.source is None else one.source.place,
                }
                for one in held.largest
            ],
        },
        "gradients_missing_bytes": found.gradients_missing_bytes,
        "optimizers": [{**to_json(each), "missing_bytes": each.missing_bytes} for each in found.optimizers],
        "has_whole_step": found.has_whole_step,
    }
