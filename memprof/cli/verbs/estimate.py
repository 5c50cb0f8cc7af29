"""`memprof estimate`: the memory that training a model needs, by published formulas, without a script to record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.cli.options.command_classes import GroupedCommand, device_option, option
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.analysis.estimate.against import RecordedSetting
    from memprof.analysis.estimate.model import Model
    from memprof.analysis.estimate.terms import Setting

_PRECISIONS = ("fp32", "fp16", "bf16", "fp16-mixed", "bf16-mixed", "fp16-autocast", "bf16-autocast")
_KINDS = ("cuda", "cpu")
_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adam8bit", "adafactor")


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  memprof estimate gpt3-175b --batch 1 --precision bf16-mixed --checkpoint layers --zero 3 --ranks 64
  memprof estimate --transformer layers=12,width=768,heads=12,vocab=50257 --batch 8 --seq 1024 --device rtx3090
  memprof estimate --mlp 784,512,10 --batch 64 --explain""",
)
@click.argument("model", required=False, metavar="[MODEL]")
@option(
    "--transformer", group="Model", metavar="KEY=VALUE,...", help="Shape: layers=12,width=768,heads=12,vocab=50257."
)
@option("--mlp", group="Model", metavar="WIDTH,...", help="Linear layers with ReLU between them: 784,512,10.")
@option("--conv", group="Model", metavar="LAYERS", help="Convolutions: 3x32x32,16k3p1,bn,relu,avgpool,linear10.")
@option("--parameters", group="Model", metavar="N", help="Only a parameter count, such as 7B: no activations.")
@option(
    "--from",
    "recorded",
    group="Model",
    type=click.Path(),
    metavar="TRACE",
    help="Compare the formulas with this recording.",
)
@option("--batch", group="Training", type=click.IntRange(min=1), metavar="N", help="Samples per rank and update (1).")
@option(
    "--seq",
    "length",
    group="Training",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens per sample (the model's context).",
)
@option("--tokens", group="Training", metavar="N", help="Tokens per rank and update, such as 1M, instead of --batch.")
@option(
    "--micro-batches",
    group="Training",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Micro-batches per update (1).",
)
@option(
    "--precision", group="Training", type=click.Choice(_PRECISIONS), help="Types of weights and activations (fp32)."
)
@option("--optimizer", group="Training", type=click.Choice(_OPTIMIZERS), help="The optimizer (adamw).")
@option(
    "--checkpoint",
    group="Training",
    metavar="WHAT",
    help="Activations to recompute: none, selective, layers, or layers:K for every K-th.",
)
@option(
    "--flash/--no-flash",
    group="Training",
    default=True,
    help="Whether attention avoids materializing its scores.",
)
@option("--no-dropout", group="Training", is_flag=True, help="Leave out the model's dropout.")
@option(
    "--zero", group="Parallelism", type=click.IntRange(0, 3), default=0, metavar="STAGE", help="ZeRO stage, 0 to 3 (0)."
)
@option("--ranks", group="Parallelism", metavar="N", type=click.IntRange(min=1), help="Data-parallel ranks (1).")
@option(
    "--tensor-parallel",
    "tensor_ranks",
    group="Parallelism",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Tensor-parallel ranks (1).",
)
@option(
    "--sequence-parallel",
    group="Parallelism",
    is_flag=True,
    help="Also shard activations outside the layers' matrix products.",
)
@device_option(
    "devices",
    "Print the fraction of this device's memory, and the number of devices needed; or a type, cpu or cuda, which sets "
    "the width of dropout masks (cuda).",
    group="Device",
    multiple=True,
)
@option("--explain", group="Output", is_flag=True, help="Print each formula's source and limitations.")
@option("--json", "is_json", group="Output", is_flag=True, help="Print everything as JSON: bytes, stable keys.")
def estimate(
    model: str | None,
    transformer: str | None,
    mlp: str | None,
    conv: str | None,
    parameters: str | None,
    recorded: str | None,
    devices: tuple[str, ...],
    explain: bool,
    is_json: bool,
    **options: Any,
) -> None:
    """Estimate the memory of training a model from published formulas.

    MODEL is a name such as gpt3-175b, gpt2 or llama3-8b, or the path of a config.json. Figures are of one rank.
    """
    from memprof.analysis.estimate.against import compare, read_setting
    from memprof.analysis.estimate.estimate import estimate as make_estimate
    from memprof.analysis.estimate.estimate import on_machine
    from memprof.cli.page import show
    from memprof.cli.pages.estimate_page import estimate_to_json, fill_estimate
    from memprof.machines.catalogue import find_machine
    from memprof.trace.store import Trace

    chosen = _model(model, transformer, mlp, conv, parameters)
    kinds = [name for name in devices if name in _KINDS]
    named = [find_machine(name) for name in devices if name not in _KINDS]
    device, options["device"] = named[-1] if named else None, kinds[-1] if kinds else None
    trace = Trace.open(recorded) if recorded is not None else None
    setting = read_setting(trace, chosen) if trace is not None else None
    found = make_estimate(chosen, _setting(chosen, setting, options))
    on = on_machine(found, device) if device is not None else None
    compared = compare(found, trace) if trace is not None else None
    show(
        lambda page: fill_estimate(page, found, on, compared, recorded or "", has_reasons=explain),
        lambda: estimate_to_json(found, on, compared),
        is_json=is_json,
    )


def _model(
    name: str | None, transformer: str | None, mlp: str | None, conv: str | None, parameters: str | None
) -> Model:
    """Parses the model given by one of the options.

    Raises:
        UsageError: No model is given, or more than one.
    """
    from memprof.analysis.estimate.config_file import is_config, read_config
    from memprof.analysis.estimate.model import Model, find_model, is_known, model_of_count, read_transformer
    from memprof.analysis.estimate.network import Network, read_perceptron

    given = [each for each in (name, transformer, mlp, conv, parameters) if each is not None]
    if len(given) != 1:
        what = "There is more than one model" if given else "There is no model"
        raise UsageError(
            f"{what} to estimate: give one of a name such as gpt3-175b, a config.json, --transformer, --mlp, "
            "--conv or --parameters."
        )
    if transformer is not None:
        return read_transformer(transformer)
    if mlp is not None:
        return Model(f"MLP {mlp}", read_perceptron(mlp))
    if conv is not None:
        return Model("network", Network.read(conv))
    if parameters is not None:
        return model_of_count(parameters)
    assert name is not None  # exactly one is given
    return read_config(Path(name)) if is_config(name) and not is_known(name) else find_model(name)


def _setting(model: Model, recorded: RecordedSetting | None, options: dict[str, Any]) -> Setting:
    """Builds the training setting: from the options, else from the recording, else from defaults.

    Raises:
        UsageError: The options contradict one another or do not apply to the model.
    """
    from memprof.analysis.estimate.model import read_count
    from memprof.analysis.estimate.terms import PRECISIONS, Setting

    batch, length, tokens = options["batch"], options["length"], options["tokens"]
    if model.context == 1 and (length is not None or tokens is not None):
        raise UsageError("--seq and --tokens apply to transformers only: give --batch.")
    if tokens is not None and batch is not None:
        raise UsageError("--tokens and --batch are mutually exclusive: give only one.")
    length = length or (recorded and recorded.length) or model.context
    batch = batch or (recorded and recorded.batch) or 1
    checkpoint, every = _checkpoint(options["checkpoint"])
    device = options["device"]
    return Setting(
        tokens=batch * length if tokens is None else read_count(tokens, "tokens"),
        length=length,
        micro_batches=options["micro_batches"],
        precision=PRECISIONS[options["precision"] or (recorded and recorded.precision) or "fp32"],
        optimizer=options["optimizer"] or (recorded and recorded.optimizer) or "adamw",
        checkpoint=checkpoint,
        every=every,
        zero=options["zero"],
        ranks=options["ranks"] or (recorded.ranks if recorded else 1),
        tensor_ranks=options["tensor_ranks"],
        is_sequence_parallel=options["sequence_parallel"],
        has_flash=options["flash"],
        has_dropout=not options["no_dropout"],
        is_on_cpu=device == "cpu" if device else recorded is not None and recorded.is_on_cpu,
    )


def _checkpoint(text: str | None) -> tuple[str, int]:
    """Parses what is recomputed: a word of CHECKPOINTS, and the layer interval.

    Raises:
        UsageError: Neither is recognized.
    """
    from memprof.analysis.estimate.terms import CHECKPOINTS

    word, has_number, number = (text or "none").partition(":")
    is_number = number.isascii() and number.isdigit() and 0 < int(number) < 10**6
    if word not in CHECKPOINTS or (has_number and (word != "layers" or not is_number)):
        raise UsageError(f"--checkpoint {text}: write none, selective, layers, or layers:4 for every fourth layer.")
    return word, int(number) if has_number else 1
