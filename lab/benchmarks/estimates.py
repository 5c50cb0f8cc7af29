"""How far are the formulas of `memprof estimate` from recordings, term by term, and from published peaks?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.benchmarks.published_peaks import read_peaks
from lab.benchmarks.recording import JOBS, ONE_THREAD, ROOT, SAMPLES, Job, ask, run
from lab.benchmarks.section import Bar, Section, least_middle_most, signed_percent

BAR_SHARE = 0.001

_GPT = "layers=4,width=128,heads=4,vocab=25,positions=128,tied=no"
_RESNET = (
    "3x32x32,16k3p1,bn,relu,([16k3p1,bn,relu,16k3p1,bn],relu)x2,"
    "[32k3s2p1,bn,relu,32k3p1,bn|32k1s2,bn],relu,[32k3p1,bn,relu,32k3p1,bn],relu,"
    "[64k3s2p1,bn,relu,64k3p1,bn|64k1s2,bn],relu,[64k3p1,bn,relu,64k3p1,bn],relu,avgpool,dropout,linear10"
)
MODELS = {
    "gpt": ("--transformer", _GPT),
    "resnet": ("--conv", _RESNET),
    "lstm": ("--parameters", "289635"),
}

#: Larger than in the tests, so that what a GPU rounds up is small: what the script is told, and what the estimate is.
_SIZES = ("--width", "256", "--inner", "1024", "--length", "128", "--vocabulary", "2048", "--batch-size", "4")
_SHAPE = "layers=3,width=256,heads=4,vocab=2048,positions=128,fused_qkv=no"
_LLAMA = "layers=3,width=256,heads=4,kv_heads=2,vocab=2048,style=llama,inner=1024"
_LLAMA_SIZES = ("--style", "llama", "--attention", "flash", "--kv-heads", "2")
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sbh (34 + 5 as/h), bf16, on a GPU (dry)": (("--precision", "bf16"), (_SHAPE, "--no-flash")),
    "the same under autocast, on a GPU (dry)": (
        ("--precision", "bf16-autocast"),
        (_SHAPE, "--no-flash", "--precision", "bf16-autocast"),
    ),
    "the same, flash, on a GPU (dry)": (("--precision", "bf16", "--attention", "flash"), (_SHAPE,)),
    "fp32, on the CPU": ((), (_SHAPE, "--no-flash")),
    "fp32, layers recomputed, on the CPU": (("--checkpoint-every", "1"), (_SHAPE, "--no-flash", "--checkpoint=layers")),
    "autocast, flash, on the CPU": (
        ("--precision", "bf16-autocast", "--attention", "flash"),
        (_SHAPE, "--precision", "bf16-autocast"),
    ),
    "grouped queries, gated, Adafactor, on the CPU": ((*_LLAMA_SIZES, "--optimizer", "adafactor"), (_LLAMA,)),
}

#: Published peaks of models that the formulas are of: torch's own modules, dropout, cross-entropy over a vocabulary.
_GPT2 = "layers=12,width=768,heads=12,vocab=50257,positions=1024,tied=no,qkv_bias=no"
PUBLISHED = {
    "gpt2_bf16_native": (f"{_GPT2},fused_qkv=no", "--no-flash", "--batch=8", "--seq=1024", "--precision=bf16"),
    "gpt2_bf16_flash": (_GPT2, "--batch=8", "--seq=1024", "--precision=bf16"),
}

_PEAKS = ("fullest moment", "all terms")
_PARTS = ("weights", "gradients", "optimizer", "activations", "ends")
COLUMNS = ("what", *_PARTS, *(f"{part}, of the peak" for part in _PEAKS))


def measure(folder: Path, *, quick: bool) -> Section:
    """Estimates what was recorded, and compares."""
    rows, worst = [], 0.0
    for name, model in MODELS.items():
        told = _estimate(*model, "--from", str(SAMPLES / name / "run.memprof"))
        rows.append(_row(f"sample {name}", told))
        worst = max(worst, _worst(told) if name != "lstm" else 0.0)
    for number, (name, (words, shape)) in enumerate(list(CASES.items())[: 2 if quick else None]):
        path, dry = folder / f"{number}.memprof", ("--dry-run", "--device", "a100-80g")
        recorded = Job(JOBS / "estimated.py", (*_SIZES, *words)).followed(path, *(dry if "(dry)" in name else ()))
        run(recorded, ROOT, **ONE_THREAD)
        told = _estimate("--transformer", *shape, "--from", str(path))
        rows.append(_row(name, told))
        worst = max(worst, _worst(told))
    rows += [_published_row(name, shape) for name, shape in PUBLISHED.items()]
    return Section(
        title="Formulas compared with recordings",
        how=(
            "Error of `memprof estimate --from` by term: the samples, `lab/benchmarks/jobs/estimated.py` on the CPU "
            "and in dry runs on an A100, and published peaks. The fullest moment assumes that gradients are freed "
            "before forward, all terms that they are not (as in the gpt sample). Formulas leave out workspaces and "
            "data; a GPU rounds tensors up to 512 bytes."
        ),
        columns=COLUMNS,
        rows=rows,
        bar=Bar(
            f"activations and ends within {BAR_SHARE:.1%} where there is a formula",
            f"{worst:.2%} at most",
            passed=worst <= BAR_SHARE,
        ),
        brief=brief_of(rows),
    )


def brief_of(rows: list[tuple[str, ...]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the table without the terms that are exact wherever there is a figure; a column names them.

    Of the cases between the samples and the published peaks, those with the lowest, the median and the highest error of
    all terms stand for the rest.
    """
    cases = [row for row in rows if not row[0].startswith(("sample ", "published "))]
    shown_cases = least_middle_most(cases, len(COLUMNS) - 1)
    rows = [row for row in rows if row not in cases or row in shown_cases]
    places = range(1, len(COLUMNS))
    exact = [place for place in places if {row[place] for row in rows} <= {"exact", ""}]
    shown = [place for place in places if place not in exact]
    names = " and ".join(COLUMNS[place] for place in exact)
    cells = [
        (row[0], *(["exact" if row[exact[0]] else ""] if exact else []), *(row[at] for at in shown)) for row in rows
    ]
    return ("what", *([names] if exact else []), *(COLUMNS[place] for place in shown)), cells


def _estimate(*words: str) -> dict[str, Any]:
    return dict(ask(ROOT, "estimate", *words))


def _row(name: str, told: dict[str, Any]) -> tuple[str, ...]:
    parts = {one["part"]: one for one in told["compared"]}
    both = parts.get("activations and ends")
    cells = [_cell(parts[part]) if part in parts else _cell(both) for part in _PARTS]
    has_formula = both is not None or "activations" in parts
    peaks = [signed_percent(parts[part]["error_ratio"]) if has_formula else "no formula" for part in _PEAKS]
    return (name, *cells, *peaks)


def _cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return "no formula"
    if not one["error_bytes"]:
        return "exact"
    return f"{one['error_bytes']:+,} B ({signed_percent(one['error_ratio'])})"


def _worst(told: dict[str, Any]) -> float:
    """Returns the largest error of what is kept for backward, as a share."""
    kept = [one for one in told["compared"] if one["part"].startswith(("activations", "ends"))]
    return max(abs(one["error_ratio"] or 0.0) for one in kept)


def _published_row(name: str, shape: tuple[str, ...]) -> tuple[str, ...]:
    (peak,) = [peak for peak in read_peaks() if peak.id == name]
    told = _estimate("--transformer", *shape)
    errors = (signed_percent(size / peak.bytes - 1) for size in (max(told["moments"].values()), told["total_bytes"]))
    return (f"published {name} ({peak.what})", *[""] * len(_PARTS), *errors)
