"""The cells of the matrix: one small training each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
REAL = Path(__file__).parents[1] / "real" / "scripts"
#: Families of transformers whose models have no attention of torch's: in one cell, with what the library chooses.
WITHOUT_SDPA = ("bloom", "convnext", "deberta-v2", "gemma2", "gpt_oss", "mamba", "mamba2", "rwkv")
#: Names of timm's models, the side of their images and further arguments: small ones of each family.
TIMM = {
    "resnet18": (64, ""),
    "resnext26ts": (64, ""),
    "efficientnet_lite0": (64, ""),
    "mobilenetv3_small_100": (64, ""),
    "regnetx_002": (64, ""),
    "convnext_atto": (64, ""),
    "vit_tiny_patch16_224": (64, "{'img_size': 64, 'depth': 4}"),
    "deit_tiny_patch16_224": (64, "{'img_size': 64, 'depth': 4}"),
    "mixer_s32_224": (64, "{'img_size': 64}"),
    "swin_tiny_patch4_window7_224": (64, "{'img_size': 64, 'window_size': 4, 'depths': (1, 1, 1, 1), 'embed_dim': 48}"),
    "densenet121": (64, ""),
    "poolformer_s12": (64, ""),
}


@dataclass(frozen=True)
class Cell:
    """A training.

    Attributes:
        name: Its name, for --only and for the file with its results.
        library: What it shows: the library, as the table names it.
        script: Its file in scripts, without the ending.
        arguments: The script's arguments.
        share: Budget of its plan, as a share of its recorded peak.
    """

    name: str
    library: str
    script: str
    arguments: tuple[str, ...] = ()
    share: float = 0.7

    @property
    def path(self) -> Path:
        """The script's file, here or among those of lab/real."""
        own = SCRIPTS / f"{self.script}.py"
        return own if own.exists() else REAL / f"{self.script}.py"


def families() -> list[str]:
    """Returns the families of transformers, read from the script that builds them."""
    text = (SCRIPTS / "families.py").read_text(encoding="utf-8")
    return re.findall(r'^    "([\w-]+)": ', text.partition("FAMILIES = {")[2].partition("\n}")[0], re.MULTILINE)


def cells() -> list[Cell]:
    """Returns all cells, in the order of the table."""
    found = []
    for family in families():
        kinds = ("",) if family in WITHOUT_SDPA else ("sdpa", "eager")
        for kind in kinds:
            words = (family, kind) if kind else (family,)
            found.append(Cell("-".join(words), "transformers", "transformers_family", words))
    found += [
        Cell("trainer", "transformers", "trainer"),
        *(Cell(kind, "peft", "peft_causal", (kind,)) for kind in ("lora", "dora")),
        Cell("qlora", "peft, bitsandbytes", "qlora"),
        Cell("lora-8bit", "peft, bitsandbytes", "qlora", ("8bit",)),
        Cell("sft", "trl", "trl_training", ("sft",)),
        Cell("dpo", "trl", "trl_training", ("dpo",)),
        Cell("grpo", "trl", "trl_training", ("grpo",)),
        Cell("unet", "diffusers", "diffusers_model", ("unet",)),
        Cell("dit", "diffusers", "diffusers_model", ("dit",)),
        Cell("unet-resident", "diffusers", "diffusers_model", ("unet", "resident")),
        Cell("dit-resident", "diffusers", "diffusers_model", ("dit", "resident")),
        *(
            Cell(f"timm-{name}", "timm", "timm_model", (name, str(size), *([more] if more else [])))
            for name, (size, more) in TIMM.items()
        ),
        Cell("accelerate", "accelerate", "accelerate_loop"),
        Cell("lightning", "lightning", "lightning_net"),
        *(Cell(f"ao-{kind}", "torchao", "torchao_training", (kind,)) for kind in ("adamw8bit", "adamw4bit", "float8")),
        *(Cell(f"bnb-{kind}", "bitsandbytes", "bitsandbytes_training", (kind,)) for kind in ("adam8bit", "linear4bit")),
        Cell("x-transformers", "x-transformers", "x_transformers_lm"),
        Cell("gat", "torch-geometric", "graph_attention"),
        Cell("megatron", "megatron-core", "megatron_core", ("--num-layers", "2")),
    ]
    return found
