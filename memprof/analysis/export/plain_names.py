"""Reduces names and command lines to words that do not identify their owner."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
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
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_SHORT = re.compile(r"-[A-Za-z]{1,2}")
_PAIR = re.compile(r"(--?[A-Za-z][\w.-]*|[+~]{0,2}[a-z][\w./@-]*)=(.*)", re.DOTALL)
_ARGUMENT_PARTS = re.compile(r"[^\s\"'=,;:/\\@?&{}\[\]()]+")


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


def scrub_command(command: Sequence[str], target: str, names: Callable[[str], str]) -> tuple[str, ...]:
    """Returns a command line without values: ``python run_….py --lr … --name=… …``.

    Args:
        command: Its words, program first.
        target: The recorded script or module among them.
        names: Removes the names of people and hosts from a text.
    """
    script = _place_of(command, target)
    shown = []
    for place, word in enumerate(command):
        if place in (0, script):
            shown.append(names(plain_name(name_of(word))))
        elif pair := _PAIR.fullmatch(word):
            # An option's name belongs to the program; text before another = may be anything.
            shown.append(f"{names(pair[1] if word.startswith('-') else plain_name(pair[1]))}={GONE}")
        elif word in ("-", "--"):
            shown.append(word)
        elif _SHORT.fullmatch(word) or (word.startswith("--") and _OPTION.fullmatch(word)):
            shown.append(names(word))
        else:
            shown.append(f"{word[:2]}{GONE}" if re.match(r"-[A-Za-z]", word) else GONE)
    return tuple(shown)


def values_of(command: Sequence[str], target: str) -> Iterator[str]:
    """Yields the values in a command line, whole and in parts: they may appear elsewhere as well."""
    script = _place_of(command, target)
    for place, word in enumerate(command):
        if place in (0, script):
            continue
        pair = _PAIR.fullmatch(word)
        is_option = word.startswith("--") or _SHORT.fullmatch(word) is not None
        value = pair[2] if pair else "" if is_option else word[2:] if word.startswith("-") else word
        yield value
        yield from _ARGUMENT_PARTS.findall(value)


def _place_of(command: Sequence[str], target: str) -> int:
    """Returns the index of the script or module; -1 where it cannot be distinguished from an argument."""
    if target in command[1:]:
        return 1 + list(command[1:]).index(target)
    is_python = bool(command) and name_of(command[0]).startswith("python")
    return 1 if is_python and len(command) > 1 and command[1].endswith(".py") else -1
