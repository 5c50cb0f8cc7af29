"""Keys and values in a model's cache stay in the short type: a plan casts what a model returns, not inside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memprof.policies.precision.policy import Precision
from tests.recorder.recorded import record

pytest.importorskip("transformers", reason="transformers is not installed")

_JOB = """
import torch
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
model = T5ForConditionalGeneration(T5Config(
    d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0, pad_token_id=0,
    attn_implementation="sdpa", dropout_rate=0.0,
))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.arange(4 * 16).reshape(4, 16) % 60 + 3
for step in range(6):
    outputs = model(input_ids=ids, labels=ids)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_caches_are_not_cast(tmp_path: Path) -> None:
    """A recording in float32 becomes a step with as many casts of keys and values as one in bf16 has."""
    (tmp_path / "job.py").write_text(_JOB)
    plain = record(tmp_path, "job.py").step
    casts = []
    for step in (
        Precision().transform(plain),
        record(tmp_path, "--precision", "bf16", "job.py", name="under.memprof").step,
    ):
        in_cache = np.array(
            ["transformers/cache_utils.py:" in str(text).partition("\n")[0] for text in step.stacks.frames]
        )
        created = step.storages.created_op_id
        made = (created != -1) & (step.ops.name[created] == "aten.cat.default")
        held = np.flatnonzero(made & in_cache[step.ops.stack_id[created]])
        assert len(held) == 2 * 2 * 2  # keys and values of both attentions in two layers of the decoder
        reads = np.isin(step.uses.storage_id, held) & (step.uses.role == "read")
        casts.append(int((step.ops.name[step.uses.op_id[reads]] == "aten._to_copy.default").sum()))
        assert set(step.storages.dtype[held]) == {"bfloat16"}
    assert casts[0] == casts[1]
