"""The pictures: which view of which recordings each shows. `make pictures` makes all of them, in light and dark."""

from __future__ import annotations

from dataclasses import dataclass

#: Where they are kept, relative to the root of the repository.
FOLDER = "docs/assets/pictures"
THEMES = ("light", "dark")
#: A job of 32 layers on a simulated RTX 4090, which does not fit; the same under a plan that fits.
BIG, FITS = "big.memprof", "fits.memprof"
#: Four ranks with batches of different sizes (ranks_job.py); samples of this repository.
RANKS = "ranks.memprof"
GPT, RESNET, LSTM = "gpt.memprof", "resnet.memprof", "lstm.memprof"
#: Further recordings of the gallery, and how each is made: the words behind ``memprof record -q -f -o FILE``.
_CARD = ("--dry-run", "--device", "rtx4090")
_SIZE = ("--layers", "32", "--width", "1280", "--heads", "20", "--length", "1024", "--batch-size", "8")
_LARGE = ("sample_traces/gpt/train.py", *_SIZE)
JOBS = {
    BIG: (*_CARD, *_LARGE),
    "oom.memprof": (*_CARD, "--strict", *_LARGE),
    "lora.memprof": (*_CARD, "lab/pictures/lora_job.py"),
    "detector.memprof": (*_CARD, "lab/pictures/detector_job.py"),
    "vit.memprof": ("tests/policies/jobs/vit.py",),
    "leak.memprof": ("--steps", "8", "lab/pictures/leaking_job.py"),
    "unet.memprof": ("--steps", "3", "lab/zoo/unet.py"),
    "experts.memprof": ("--steps", "3", "lab/zoo/mixture_of_experts.py"),
    "agent.memprof": ("--steps", "3", "lab/zoo/actor_critic.py"),
    "denoiser.memprof": ("--dry-run", "lab/benchmarks/jobs/compiled.py", "diffusion"),
    "eight.memprof": (
        "--dry-run",
        "--device",
        "h100-80g",
        "--ranks",
        "8",
        "tests/virtual/rank_jobs/stages.py",
        "1f1b",
    ),
}
#: How the job under a plan is made, but for the plan.
FITTED = JOBS[BIG]
#: Height of the pictures of the gallery.
_LOW = 720


@dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        name: Its file's name, without theme and ending.
        recordings: What the dashboard is opened on.
        search: The view, as in the address.
        part: Selector of the part of the page that is shown; "" for the window.
        clicks: Selectors that are clicked before.
        waits: Selector of what must be there.
        width: Width of the window, in pixels.
        height: Its height.
    """

    name: str
    recordings: tuple[str, ...]
    search: str = ""
    part: str = ""
    clicks: tuple[str, ...] = ()
    waits: str = "#timeline .main-svg .scatterlayer .trace"
    width: int = 1440
    height: int = 900


PICTURES = (
    Picture("overview", (BIG,)),
    Picture("fits", (FITS, BIG), "other=1"),
    Picture("timeline", (GPT,), "first=0&end=3072&budget=60%25", part=".time"),
    Picture("table", (BIG,), part=".side"),
    Picture("flame", (GPT,), "side=flame&by=stack", part=".side", waits="#boxes-graph .icicle"),
    Picture("treemap", (BIG,), "side=treemap", part=".side", waits="#boxes-graph .treemap"),
    Picture("storage", (GPT,), part=".side", clicks=("#live-table td button",), waits="#live-detail .stack"),
    Picture("what-if", (BIG,), "tab=whatif", part="#panel", clicks=(".next .main",), waits="#whatif-result .verdict"),
    Picture("plan", (BIG,), "plan=checkpoint%3Dlayers.*", height=1330),
    Picture("over", (BIG, FITS), "other=1&lay=over", part=".time"),
    Picture("leaks", ("leak.memprof",), "tab=leaks", part="#panel", waits="#panel .js-plotly-plot .main-svg"),
    Picture("lifetimes", (GPT,), "tab=blocks", part="#panel", waits="#panel .js-plotly-plot .main-svg"),
    Picture("segments", (BIG,), "tab=segments", part="#panel", waits="#panel .js-plotly-plot .main-svg"),
    Picture("diff", (BIG, FITS), "tab=diff&other=1", part="#panel", waits="#diff-overlay .scatterlayer .trace"),
    Picture("ranks", (RANKS,), "tab=ranks", part="#panel", waits="#panel .js-plotly-plot .main-svg"),
    Picture("resnet", (RESNET,), height=_LOW),
    Picture("lstm", (LSTM,), "side=flame&by=line", waits="#boxes-graph .icicle", height=_LOW),
    Picture("unet", ("unet.memprof",), "side=treemap", waits="#boxes-graph .treemap", height=_LOW),
    Picture(
        "experts", ("experts.memprof",), "first=0&end=100000&side=treemap", waits="#boxes-graph .treemap", height=_LOW
    ),
    Picture("leak", ("leak.memprof",), "first=0&end=100000&by=line", height=_LOW),
    Picture("oom", ("oom.memprof",), height=_LOW),
    Picture("lora", ("lora.memprof",), height=_LOW),
    Picture("denoiser", ("denoiser.memprof",), "side=treemap", waits="#boxes-graph .treemap", height=_LOW),
    Picture("detector", ("detector.memprof",), "side=treemap", waits="#boxes-graph .treemap", height=_LOW),
    Picture("vit", ("vit.memprof",), height=_LOW),
    Picture("agent", ("agent.memprof",), "first=0&end=100000", height=_LOW),
    Picture("eight", ("eight.memprof",), "tab=ranks", part="#panel", waits="#panel .js-plotly-plot .main-svg"),
)
#: The recorded terminal session and the report of the README.
SESSION = "session"
REPORT = "report"


def files() -> list[str]:
    """Returns the names of all files that `make pictures` writes."""
    shots = [f"{picture.name}-{theme}.png" for picture in PICTURES for theme in THEMES]
    return sorted([*shots, f"{SESSION}.svg", f"{REPORT}.svg"])
