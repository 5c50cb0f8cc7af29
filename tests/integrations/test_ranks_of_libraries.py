"""Integrations in a training of two processes: a file for each rank, and the losses of the training alone."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from memprof.trace.schema import Steps
from memprof.trace.store import Trace
from tests.integrations.two_ranks import run_on_two_ranks

_WHOLE = """
import json, os, sys
import torch

path = sys.argv[1] if len(sys.argv) > 1 else None
losses = []
{job}
with open(f"losses.{{os.environ['RANK']}}.json", "w") as file:
    json.dump(losses, file)
"""
_NET = """
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 4))
data = TensorDataset(torch.randn(20 * 64, 64), torch.randint(0, 4, (20 * 64,)))
"""
_ACCELERATE = (
    _NET
    + """
from accelerate import Accelerator
from memprof.integrations.accelerate import record

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32))
assert accelerator.num_processes == 2
if path:
    record(accelerator, path)
for rows, labels in loader:
    with accelerator.accumulate(model):
        loss = functional.cross_entropy(model(rows), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
accelerator.end_training()
"""
)
_LIGHTNING = (
    _NET
    + """
import lightning.pytorch as lightning
from memprof.integrations.lightning import MemprofCallback

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, batch, number):
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[MemprofCallback(path)] if path else [],
)
trainer.fit(Net(), DataLoader(data, batch_size=32))
"""
)
_LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed
from memprof.integrations.hf import MemprofCallback

class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            losses.append(logs["loss"])

set_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
))
common = dict(
    output_dir="out", max_steps=6, per_device_train_batch_size=4, use_cpu=True, ddp_backend="gloo", report_to=[],
    save_strategy="no", disable_tqdm=True, logging_steps=1, bf16=False,
)
callbacks = [Losses(), *([MemprofCallback(path)] if path else [])]
"""
_TRAINER = (
    _LLAMA
    + """
from transformers import Trainer, TrainingArguments

rows = [torch.randint(3, 64, (32,)) for _ in range(64)]
data = [{"input_ids": row, "labels": row} for row in rows]
Trainer(model=model, args=TrainingArguments(**common), train_dataset=data, callbacks=callbacks).train()
"""
)
_SFT = (
    _LLAMA
    + """
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(60))]
inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
)
texts = [" ".join(f"w{(number * 7 + place) % 60}" for place in range(24)) for number in range(64)]
SFTTrainer(
    model=model, args=SFTConfig(**common, max_length=32), train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer, callbacks=callbacks,
).train()
"""
)
_JOBS = {
    "accelerate": (("accelerate",), _ACCELERATE, 2),
    "lightning": (("lightning",), _LIGHTNING, 1),
    "transformers": (("transformers", "accelerate"), _TRAINER, 1),
    "trl": (("trl", "datasets"), _SFT, 1),
}


def _train(folder: Path, job: str, *words: str) -> list[list[float]]:
    """Trains on two processes, and returns the losses of each rank."""
    run_on_two_ranks(folder, _WHOLE.format(job=job), *words)
    return [json.loads((folder / f"losses.{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("library", _JOBS)
def test_each_rank_has_its_file_and_its_losses(library: str, tmp_path: Path) -> None:
    """Each rank writes its own recording of complete steps, the first file opens both, and losses are the same."""
    needs, job, micro_batches = _JOBS[library]
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed: make test-libraries has it")
    plain = _train(tmp_path, job)
    assert len(plain[0]) >= 5
    assert _train(tmp_path, job, "run.memprof") == plain
    written = sorted(path.name for path in tmp_path.glob("*.memprof"))
    assert [name for name in written if "rank" in name] == ["run.rank0.memprof", "run.rank1.memprof"]
    assert Trace.open(tmp_path / "run.memprof").ranks == (0, 1)
    for rank in (0, 1):
        trace = Trace.open(tmp_path / f"run.rank{rank}.memprof")
        assert trace.manifest.rank == rank
        assert len(trace.recorded_steps) == 3
        steps = trace.table(Steps)
        assert set(steps.micro_batches[steps.kind == "recorded"]) == {micro_batches}
        step = trace.steady_step()
        assert {"forward", "backward", "optimizer"} <= set(step.ops.phase)
        assert "collective" in set(step.storages.category) | set(step.ops.kind)
