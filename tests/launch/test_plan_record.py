"""``memprof record --plan`` from end to end: unmodified scripts trained under a plan, and plans that do not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from memprof.launch.parent.job_process import recording_environment
from memprof.launch.parent.settings import Settings
from memprof.policies.allocator.policy import Allocator
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import parse_plan, write_plan
from memprof.policies.plan.prediction import Prediction
from memprof.trace.store import Trace
from tests.scripts import net_of_blocks

ROOT = Path(__file__).parent.parent.parent
GPT = str(ROOT / "tests" / "policies" / "jobs" / "gpt.py")

TRAINING = (
    net_of_blocks(3)
    + """\
torch.manual_seed(0)
model, loss_of = Net(), nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("begins", flush=True)
with torch.no_grad():
    model(torch.randn(2, 64))
for step in range(8):
    optimizer.zero_grad()
    loss = loss_of(model(torch.randn(128, 64)), torch.zeros(128, 64))
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()), "forward" in model.layers[1].__dict__, flush=True)
"""
)

TWO_MODELS = """
import torch
from torch import nn
class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)))
    def forward(self, x):
        return self.layers(x)
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)))
    def forward(self, x):
        return self.blocks(x).mean()
generator, critic = Generator(), Critic()
optimizers = [torch.optim.Adam(model.parameters()) for model in (generator, critic)]
for step in range(8):
    for optimizer in optimizers:
        optimizer.zero_grad()
    critic(torch.randn(8, 64)).backward()
    critic(generator(torch.randn(8, 64))).backward()
    for optimizer in optimizers:
        optimizer.step()
print(*[name for model in (generator, critic) for name, m in model.named_modules() if "forward" in m.__dict__])
"""

PARTS = """
import torch
from torch import nn
class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters())
for step in range(8):
    optimizer.zero_grad()
    model.decoder(model.encoder(torch.randn(8, 64))).mean().backward()
    optimizer.step()
print(*[name for name, module in model.named_modules() if "forward" in module.__dict__])
"""

IN_THREAD = """
import threading, torch
def train():
    model = torch.nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    print("trained")
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""

LATE_OPTIMIZER = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
optimizer = None
for step in range(8):
    loss = model(torch.randn(512, 64)).square().mean()
    if optimizer is None:  # as Pyro makes its own, once it has seen the parameters
        optimizer = torch.optim.Adam(model.parameters())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(repr(loss.item()))
"""

NO_OPTIMIZER = """
import torch
from torch import nn
model = nn.Linear(64, 64)
for step in range(8):
    model(torch.randn(32, 64)).square().mean().backward()
    print(step, flush=True)
"""

OWN_CALL = """
import torch
from torch import nn
class Module(nn.Module):
    def __call__(self, *inputs):  # as GPyTorch has it: torch sees no call
        return self.forward(*inputs)
class Block(Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        x = torch.tanh(x @ self.wide.weight.t())
        return torch.tanh(x @ self.narrow.weight.t())
class Net(Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    optimizer.zero_grad()
    loss = model(torch.randn(512, 64)).square().mean()
    loss.backward()
    optimizer.step()
    print(repr(loss.item()))
"""

PER_SAMPLE = """
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128))
optimizer = torch.optim.Adam(model.parameters())
def loss_of(weights, x):
    return functional_call(model, weights, (x,)).square().mean()
for step in range(8):
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    each = vmap(grad(loss_of), in_dims=(None, 0))(weights, torch.randn(4, 128))
    for name, parameter in model.named_parameters():
        parameter.grad = each[name].clamp(-1, 1).mean(0)
        print(repr(parameter.grad.sum().item()))
    del weights, each
    optimizer.step()
"""

WITHOUT_MODEL = """
import torch
weight = torch.randn(4, 4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(8):
    (weight @ weight).sum().backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    scripts = {
        "train.py": TRAINING,
        "two.py": TWO_MODELS,
        "parts.py": PARTS,
        "thread.py": IN_THREAD,
        "late.py": LATE_OPTIMIZER,
        "none.py": NO_OPTIMIZER,
        "own_call.py": OWN_CALL,
        "per_sample.py": PER_SAMPLE,
        "without.py": WITHOUT_MODEL,
        "hello.py": "open('ran', 'w')",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def memprof(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMPROF_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "memprof.cli.main", *words],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def left(folder: Path) -> set[str]:
    """Names what memprof left in the folder."""
    return {path.name for path in folder.iterdir() if path.suffix not in (".py", ".toml")} - {"ran"}


def prediction(model: str, parameter_bytes: int) -> Prediction:
    return Prediction("run.memprof", model, parameter_bytes, 2**20, 1e3, 2**19, "forward", "", 1e3, "replayed")


def test_script_trains_under_a_plan_from_its_first_step() -> None:
    """Losses are those of the plain run to the bit, every step runs under the plan, and the trace says which."""
    plain = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=True).stdout
    Path("plan.toml").write_text("[checkpoint]\nmodules = ['layers.*']\n")
    ended = memprof("record", "-o", "run.memprof", "--plan", "plan.toml", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == plain.replace("False", "True")
    assert Trace.open("run.memprof").manifest.plan == {"checkpoint": {"modules": ["layers.*"]}}
    assert "predicted" not in ended.stderr
    shown = memprof("report", "run.memprof").stdout
    assert shown.splitlines()[1].startswith("train.py | under checkpoint layers.* | ")


def test_flags_add_to_the_plan() -> None:
    """Flags are repeatable and come on top of the file's policies, in the plan's own order."""
    Path("plan.toml").write_text("[checkpoint]\nmodules = ['layers.0']\n")
    words = ("--plan", "plan.toml", "--checkpoint", "layers.2", "--precision", "bf16")
    ended = memprof("record", "-q", "-o", "run.memprof", *words, "train.py")
    assert (ended.returncode, ended.stderr) == (0, "")
    plan = Trace.open("run.memprof").manifest.plan
    assert plan == {
        "precision": {"dtype": "bf16"},
        "checkpoint": [{"modules": ["layers.0"]}, {"modules": ["layers.2"]}],
    }
    assert list(plan) == ["precision", "checkpoint"]


def test_real_model_meets_its_prediction() -> None:
    """record, predict --write, record --plan, verify: the peak is met to the byte, and said so at the end."""
    assert memprof("record", "-q", "-o", "run.memprof", GPT, "--steps", "8").returncode == 0
    predicted = memprof("predict", "run.memprof", "--checkpoint", "layers.*", "--write", "plan.toml")
    assert predicted.returncode == 0, predicted.stderr
    assert f"next: memprof record --plan plan.toml {GPT} --steps 8" in predicted.stdout
    ended = memprof("record", "-o", "head.memprof", "--plan", "plan.toml", GPT, "--steps", "8")
    assert ended.returncode == 0
    sentence, comparison, following = ended.stderr.splitlines()
    assert sentence.startswith("memprof: recorded 3 steps of")
    assert comparison.startswith("memprof: predicted peak ")
    assert ": exact. Step time predicted" in comparison
    assert following == "memprof: next: memprof verify plan.toml head.memprof"
    verified = memprof("verify", "plan.toml", "run.memprof", "head.memprof")
    assert verified.returncode == 0
    assert "warning" not in verified.stdout


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("late.py", ("--swap", "optimizer:disk")),
        ("own_call.py", ("--remat", "2.6MiB")),
        ("per_sample.py", ("--swap", "optimizer:disk")),
    ],
    ids=["optimizer made after the first call", "no call that torch sees", "called with other weights"],
)
def test_a_plan_that_comes_with_the_second_step(script: str, flags: tuple[str, str]) -> None:
    """Where the first call shows no optimizer, or no call is seen, the plan is in force from the second step on."""
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert memprof("record", "-q", "-o", "run.memprof", script).returncode == 0
    predicted = memprof("predict", "run.memprof", *flags, "--write", "plan.toml")
    assert predicted.returncode == 0, predicted.stderr
    ended = memprof("record", "-o", "head.memprof", "--plan", "plan.toml", script)
    assert (ended.returncode, ended.stdout) == (0, plain), ended.stderr
    found = json.loads(memprof("verify", "plan.toml", "head.memprof", "--json").stdout)
    measured = found["measured"]["peak_allocated_bytes"]
    assert measured < 0.95 * int(Trace.open("run.memprof").steady_step().memory.allocated_bytes.max())
    bounds = tomllib.loads(Path("plan.toml").read_text())["prediction"]
    assert bounds["least_peak_bytes"] <= measured <= bounds["most_peak_bytes"]
    if "--remat" not in flags:  # what remat evicts below its cap depends on measured times
        assert measured == pytest.approx(found["predicted"]["peak_allocated_bytes"], rel=0.001)


def test_a_job_that_makes_no_optimizer_is_refused_at_its_second_call() -> None:
    """One that updates its weights itself runs no further than that."""
    ended = memprof("record", "-o", "run.memprof", "--swap", "optimizer:disk", "none.py")
    assert (ended.returncode, ended.stdout) == (125, "0\n")
    assert "needs an optimizer of the model's parameters" in ended.stderr


@pytest.mark.parametrize(("pattern", "changed"), [("*", "encoder decoder"), ("*.0", "encoder.0 decoder.0")])
def test_a_pattern_is_of_the_outermost_module_where_a_part_is_called(pattern: str, changed: str) -> None:
    """As in a recording, by whose names it was predicted: ``*`` is each part, and not each of its layers."""
    ended = memprof("record", "-q", "-o", "run.memprof", "--checkpoint", pattern, "parts.py")
    assert (ended.returncode, ended.stdout) == (0, f"{changed}\n"), ended.stderr


def test_each_of_several_models_gets_what_matches_it() -> None:
    """Patterns go to the models they match, as the trace names them too; the job ends with all of them applied."""
    words = ("--checkpoint", "Generator.layers.0", "--checkpoint", "blocks.*")
    ended = memprof("record", "-o", "run.memprof", *words, "two.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["layers.0", "blocks.0", "blocks.1"]
    assert len(ended.stderr.splitlines()) == 2


@pytest.mark.slow
def test_parts_that_are_called_by_themselves() -> None:
    """Where the script calls the model's parts, patterns are those of the whole model."""
    ended = memprof("record", "-q", "-o", "run.memprof", "--checkpoint", "encoder.0", "--checkpoint", "*.1", "parts.py")
    assert ended.returncode == 0, ended.stderr
    assert set(ended.stdout.split()) == {"encoder.0", "encoder.1", "decoder.1"}


@pytest.mark.parametrize(
    ("script", "words", "sentence"),
    [
        ("train.py", ("--checkpoint", "layer.*"), "no module of the model matches 'layer.*'; did you mean layers"),
        pytest.param(
            "two.py",
            ("--checkpoint", "blocks.*", "--checkpoint", "bloks.*"),
            "no module of the model matches 'bloks.*'",
            marks=pytest.mark.slow,
        ),
        ("thread.py", ("--checkpoint", "layers.*"), "no module of the model matches 'layers.*'"),
        # The model is one Linear: it has no parts that a wildcard could match.
        ("thread.py", ("--checkpoint", "*"), "no module of the model matches '*'"),
        pytest.param(
            "train.py",
            ("--plan", "other.toml"),
            "the plan was made for another model: for GPT, and this is Net.",
            marks=pytest.mark.slow,
        ),
        (
            "train.py",
            ("--plan", "size.toml"),
            "the plan was made for another model: for Net with 4.00 KiB of parameters",
        ),
    ],
)
def test_plan_that_does_not_fit_ends_the_job_before_its_first_step(
    folder: Path, script: str, words: tuple[str, ...], sentence: str
) -> None:
    """One message on stderr, no traceback, status 125, no training step, and no files left."""
    write_plan("other.toml", Plan((Checkpoint(modules=("layers.*",)),), prediction("GPT", 4096)))
    write_plan("size.toml", Plan((Checkpoint(modules=("layers.*",)),), prediction("Net", 4096)))
    ended = memprof("record", "-q", "-o", "run.memprof", *words, script)
    assert ended.returncode == 125
    assert ended.stdout in ("", "begins\n")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"memprof: {sentence}")
    assert left(folder) == set()


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("--plan", "absent.toml"), 125, "plan absent.toml does not exist"),
        (("--plan", "broken.toml"), 125, "broken.toml is not valid TOML: "),
        (("--plan", "unknown.toml"), 2, "unknown.toml, line 2: a plan has no policy 'chekpoint'; did you mean check"),
        (("--plan", "setting.toml"), 2, "setting.toml, line 2: [checkpoint] has no setting 'module'"),
        (("--precision", "int3"), 2, "unknown --precision 'int3'"),
        (("--accumulate", "none"), 2, ""),
    ],
)  # fmt: skip
def test_what_is_known_before_the_start_starts_nothing(
    folder: Path, words: tuple[str, ...], status: int, sentence: str
) -> None:
    """A mistake in the plan is one sentence, and the job does not run."""
    Path("broken.toml").write_text("[checkpoint")
    Path("unknown.toml").write_text("\n[chekpoint]\n")
    Path("setting.toml").write_text("[checkpoint]\nmodule = ['layers.*']\n")
    ended = memprof("record", *words, "hello.py")
    assert ended.returncode == status
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"memprof: {sentence}")
    assert not (folder / "ran").exists()
    assert left(folder) == set()


def test_plan_that_met_no_model_is_reported() -> None:
    """A job that calls no model in training runs to its end, and the last line says that the plan was not applied."""
    ended = memprof("record", "-o", "run.memprof", "--checkpoint", "layers.*", "without.py")
    assert ended.returncode == 0
    assert ended.stderr.splitlines()[-1] == (
        "memprof: the plan was not applied: no model of the job was called in training."
    )


def test_plan_travels_in_the_environment() -> None:
    """The child is given the plan as TOML, and from its start the variables that the policies ask for."""

    plan = Plan((Checkpoint(modules=("layers.*",)),))
    variables = recording_environment({}, Path("spool"), Settings(plan=plan))

    assert parse_plan(json.loads(variables["MEMPROF_SETTINGS"])["plan"]) == plan
    policy = Allocator(expandable_segments=True)
    (name,) = policy.environment()
    variables = recording_environment({name: "mine"}, Path("spool"), Settings(plan=Plan((policy,))))
    assert variables[name] == policy.environment()[name]


def test_plan_may_be_set_for_a_project(folder: Path) -> None:
    """MEMPROF_PLAN and `plan` in [tool.memprof] name the plan where --plan does not."""
    (folder / "pyproject.toml").write_text("[tool.memprof]\nplan = 'absent.toml'\n")
    ended = memprof("record", "hello.py")
    assert ended.returncode == 125
    assert f"plan {folder / 'absent.toml'} does not exist" in ended.stderr
