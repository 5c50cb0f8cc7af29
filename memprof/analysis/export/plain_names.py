"""Reduces a name to words that do not identify its owner: the common vocabulary of program names."""

from __future__ import annotations

import re
from pathlib import PurePosixPath, PureWindowsPath

#: Placeholder for removed text.
GONE = "…"

#: Words of files, folders, programs and modules that identify neither people nor organizations.
_TEXT = """
name size width depth hidden dim rate seed epoch epochs batch logger wandb learning weight decay
python pypy torchrun torch accelerate deepspeed lightning launch mpirun mpiexec srun sbatch bash sh zsh dash env uv
run poetry conda pipenv ipython jupyter nohup nice time timeout numactl taskset memprof colossalai horovodrun train
training trainer pretrain pretraining finetune finetuning tune tuning sft dpo rlhf grpo ppo lora qlora fit eval
evaluate evaluation validate validation test tests testing infer inference predict generate sample sampling main
init runner job script scripts entry start app cli command example examples demo tutorial benchmark bench model
models modeling net nets network networks layer layers block blocks module modules encoder decoder head neck
backbone attention attn mlp ffn conv cnn rnn lstm gru gpt nanogpt minigpt bert llama mistral qwen gemma vit clip
resnet unet vae gan diffusion transformer transformers moe mixture embedding embeddings positional norm activation
optim optimizer optimizers scheduler schedulers loss losses criterion metric metrics engine loop step steps ema
data dataset datasets dataloader loader loaders collate tokenizer tokenize tokens text image images audio video
preprocess preprocessing transforms augment utils util helper helpers common core lib src base types const
constants config configs configuration args arguments options settings params hparams registry factory build
builder checkpoint checkpoints ckpt save load io log logs logger logging callback callbacks hook hooks distributed
dist ddp fsdp zero parallel pipeline tensor tp pp dp device cuda gpu cpu amp precision quant quantize compile
export onnx profile profiler memory debug small large tiny big mini simple minimal basic new old other single multi
word language vision mnist cifar imagenet toy random synthetic regression classification classifier segmentation
detection translation summarization recording spool csv parquet py pyx ipynb yaml yml json toml txt out of the and
a an in on with for to by from my own all two one three node rank process worker workers local server client exe
zip x so
"""
_WORDS = frozenset(_TEXT.split())
_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^A-Za-z\d]+")
_ORDINARY = re.compile(r"[\s_.\-/()\[\]<>:#+]*")


def name_of(path: str) -> str:
    """Returns the last component of a Windows or POSIX path."""
    return PureWindowsPath(path).name if "\\" in path else PurePosixPath(path).name


def plain_name(name: str) -> str:
    """Returns a file, module or program name without its identifying words.

    ``net/model.py`` stays, ``run_alice.py`` becomes ``run_….py``. One or two letters and digits identify nobody.
    """
    shown: list[str] = []
    for part in _PARTS.findall(name):
        is_kept = part.lower() in _WORDS or len(part) <= 2 or _ORDINARY.fullmatch(part)
        if is_kept or not shown or shown[-1] != GONE:
            shown.append(part if is_kept else GONE)
    return "".join(shown)


def is_plain(word: str) -> bool:
    """Whether a word does not identify anybody."""
    return plain_name(word) == word
