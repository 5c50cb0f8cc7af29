"""Every policy has the same peak on tensors without memory as in a real run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from memprof.analysis.ranks.rank_report import job_notes
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan_file import write_plan
from memprof.replay.live import live_bytes
from tests.recorder.recorded import Ended, record

pytestmark = pytest.mark.timeout(600)

_SAMPLES = Path(__file__).parents[2] / "sample_traces"
_GPT = (
    str(_SAMPLES / "gpt" / "train.py"),
    *("--layers", "2", "--width", "32", "--batch-size", "4", "--length", "32", "--steps", "6"),
)
_RESNET = (str(_SAMPLES / "resnet" / "train.py"), "--steps", "6")
_LSTM = (str(_SAMPLES / "lstm" / "train.py"), "--steps", "6")
#: What a plan file says, of the GPT with its layers, and of the others as a whole.
_PLANS = {
    "loss": "[loss]\nchunks = 4\nminimum_bytes = 0\n",
    "loss of a head": "[loss]\nchunks = 4\nhead = 'head'\nminimum_bytes = 0\n",
    "compress": "[compress]\nmodules = ['layers.*']\nminimum_bytes = 0\n",
    "compress all": "[compress]\nminimum_bytes = 0\n",
    "swap": "[swap]\nmodules = ['layers.*']\nto = 'disk'\nminimum_bytes = 4096\n",
    "swap all": "[swap]\nto = 'disk'\nminimum_bytes = 0\nprefetch = 3\n",
    "swap optimizer": "[swap]\nwhat = 'optimizer'\nto = 'disk'\nminimum_bytes = 0\n",
    "swap parameters": "[swap]\nwhat = 'parameters'\nmodules = ['layers.*']\nto = 'disk'\nminimum_bytes = 0\n",
    "ddp": "[shard]\nstage = 0\nworld_size = 2\n",
    "zero1": "[shard]\nstage = 1\nworld_size = 2\n",
    "zero2": "[shard]\nstage = 2\nworld_size = 2\n",
    "fsdp": "[shard]\nstage = 3\nworld_size = 3\n",
    "several": "[shard]\nstage = 3\nworld_size = 2\n[loss]\nchunks = 4\nhead = 'head'\nminimum_bytes = 0\n"
    "[checkpoint]\nmodules = ['layers.0']\n[compress]\nmodules = ['layers.1']\nminimum_bytes = 0\n",
}


def real_and_dry(folder: Path, plan: str, job: tuple[str, ...]) -> tuple[Ended, Ended]:
    """Records a job under a plan, and dry-runs it, both at once."""
    (folder / "plan.toml").write_text(_PLANS[plan])
    words = ("--plan", "plan.toml", *job)
    with ThreadPoolExecutor() as pool:
        real = pool.submit(record, folder, "--stop", *words, name="real.memprof")
        dry = pool.submit(record, folder, "--dry-run", *words, name="dry.memprof")
        return real.result(), dry.result()


@pytest.mark.parametrize(
    ("plan", "job"),
    [
        *(
            pytest.param(plan, _GPT, id=f"{plan}-gpt", marks=[] if is_quick else pytest.mark.slow)
            for plan, is_quick in (
                ("loss", False),
                ("loss of a head", True),
                ("compress", False),
                ("swap", True),
                ("swap optimizer", False),
                ("swap parameters", False),
            )
        ),
        *(
            pytest.param(plan, job, id=f"{plan}-{name}", marks=pytest.mark.slow)
            for plan in ("compress all", "swap all", "swap optimizer")
            for name, job in (("resnet", _RESNET), ("lstm", _LSTM))
        ),
    ],
)
def test_what_is_kept_moved_or_shortened_is_as_in_a_real_run(tmp_path: Path, plan: str, job: tuple[str, ...]) -> None:
    """The allocated peak is that of the real run under the same plan, to the byte."""
    real, dry = real_and_dry(tmp_path, plan, job)
    assert dry.peak == real.peak


@pytest.mark.parametrize(
    ("plan", "job"),
    [
        *(
            pytest.param(plan, _GPT, id=f"{plan}-gpt", marks=[] if plan == "fsdp" else pytest.mark.slow)
            for plan in ("ddp", "zero1", "zero2", "fsdp", "several")
        ),
        *(pytest.param("fsdp", job, id=f"fsdp-{name}", marks=pytest.mark.slow) for name, job in (("lstm", _LSTM),)),
    ],
)
def test_a_rank_is_dry_run_alone_as_it_is_among_others(tmp_path: Path, plan: str, job: tuple[str, ...]) -> None:
    """Rank 0 has the peak that it has under torchrun, which is not started; what gloo's threads hold is some bytes.

    The recording notes that the other ranks were not run.
    """
    real, dry = real_and_dry(tmp_path, plan, job)
    # A thread of gloo's may still hold what it sent last: a number a parameter.
    assert 0 <= real.peak - dry.peak <= 8 * 64
    assert (dry.step.storages.category == "collective").any()
    [note] = [note for note in job_notes(dry.trace) if "dry-run" in note]
    assert "only rank 0 was dry-run" in note


_COPIED = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0), 3)
head = nn.Linear(32, 32)
optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()])
kept = []
for step in range(9):
    x = torch.rand(4, 16, 32)
    made = head(encoder(x))
    losses = [F.mse_loss(made, x), F.smooth_l1_loss(made, x), F.huber_loss(made, x, reduction="sum")]
    losses += [F.binary_cross_entropy(made.sigmoid(), x), F.binary_cross_entropy_with_logits(made, x)]
    losses += [F.soft_margin_loss(made, x.sign())]
    sum(losses).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_copies_of_models_and_losses_reduced_in_place_are_as_large_as_they_are(tmp_path: Path) -> None:
    """A model's layers that torch copies are counted once; a loss that returns the memory of all its terms, with it.

    4 x 16 x 32 terms of 4 bytes are in the loss of `mse_loss`, whose result is one number.
    """
    (tmp_path / "job.py").write_text(_COPIED)
    with ThreadPoolExecutor() as pool:
        real = pool.submit(record, tmp_path, "--stop", "job.py", name="real.memprof")
        dry = pool.submit(record, tmp_path, "--dry-run", "job.py", name="dry.memprof").result()
    assert dry.peak == real.result().peak
    step = dry.step
    loss = int((step.ops.name == "aten.mse_loss.default").argmax())
    made = step.storages.created_op_id == step.ops.op_id[loss]
    assert 4 * 16 * 32 * 4 in step.storages.allocated_bytes[made]


_ON_DEVICE = """
import torch
from torch import nn
model = nn.Sequential(nn.Embedding(512, 128), *[nn.Linear(128, 128) for _ in range(4)], nn.Linear(128, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    ids = torch.randint(512, (16, 64)).cuda()
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_is_in_host_memory_is_not_on_the_device(tmp_path: Path) -> None:
    """The peak, in forward, is lower by the optimizer's state.

    Tensors from 64 KiB on are moved, and nothing is left of them on the device.
    """
    (tmp_path / "job.py").write_text(_ON_DEVICE)
    words = ("--dry-run", "--device", "a100-80g")
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(record, tmp_path, *words, *flags, "job.py", name=f"{name}.memprof")
            for name, flags in (
                ("plain", ()),
                ("kept", ("--optimizer", "host")),
                ("moved", ("--swap", "optimizer:host")),
            )
        ]
        plain, kept, moved = (run.result() for run in runs)
    storages = plain.step.storages
    sizes = storages.allocated_bytes[(storages.category == "optimizer_state") & (storages.device == "cuda:0")]
    assert plain.peak - kept.peak == int(sizes.sum())
    assert plain.peak - moved.peak == int(sizes[sizes >= 2**16].sum())


@pytest.mark.slow
def test_fused_sgd_writes_to_its_arguments_only(tmp_path: Path) -> None:
    """torch has no shapes for this operator, which returns nothing; its momenta are there without temporaries."""
    job = _ON_DEVICE.replace("AdamW(model.parameters())", "SGD(model.parameters(), lr=0.1, momentum=0.9)")
    (tmp_path / "job.py").write_text(job)
    words = ("--dry-run", "--device", "a100-80g")
    plain = record(tmp_path, *words, "job.py")
    fused = record(tmp_path, *words, "--optimizer", "fused", "job.py", name="fused.memprof")
    assert fused.peak == int(live_bytes(OptimizerPolicy(loop="fused").transform(plain.step)).during.max())


def test_a_job_that_clips_gradients_fits_in_less_than_its_static_state(tmp_path: Path) -> None:
    """Updates within backward are impossible then: the optimizer's state goes to host memory, as predicted."""
    update = "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()"
    job = _ON_DEVICE.replace("    optimizer.step()", update).replace("128", "2048").replace("16, 64", "2, 16")
    (tmp_path / "job.py").write_text(job)
    words = ("--dry-run", "--device", "a100-80g")
    plain = record(tmp_path, *words, "job.py")
    storages = plain.step.storages
    is_static = np.isin(storages.category, ("parameter", "gradient", "optimizer_state"))
    budget = int(storages.allocated_bytes[is_static & (storages.device == "cuda:0")].sum() * 0.7)
    found = explore(plain.step, SearchRequest(budget)).best
    assert found is not None
    assert OptimizerPolicy(state="host") in found.policies
    write_plan(tmp_path / "plan.toml", found.plan)
    assert record(tmp_path, *words, "--plan", "plan.toml", "job.py", name="head.memprof").peak == found.peak_bytes
