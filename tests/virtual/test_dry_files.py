"""Checkpoints, ranks and jobs without a model in a dry run: shapes are read, and what is missing is named."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.recorder.recorded import record_both, record_script

_MODEL = """
import os, sys, torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, ids):
        return self.head(self.embed(ids))

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        model(torch.randint(0, 100, (4, 8))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

_SAVES = """
saved = {"model": Tied().state_dict(), "row": torch.zeros(1000, 10)[3], "ids": torch.arange(7), "step": 5}
torch.save(saved, "run.pt")
torch.save(Tied(), "model.pt")
"""

#: What is kept of the file stays alive while the job trains.
_LOADS = """
model = Tied()
kept = torch.load("run.pt")
with open("run.pt", "rb") as file:
    again = torch.load(file, map_location="cpu")
mapped = torch.load("run.pt", map_location=lambda storage, place: storage, mmap=True)
whole = torch.load("model.pt", weights_only=False)
for one in (kept, again, mapped):
    assert one["step"] == 5
    assert one["ids"].tolist() == [0, 1, 2, 3, 4, 5, 6], one["ids"]
    embed, head = one["model"]["embed.weight"], one["model"]["head.weight"]
    assert embed.shape == (100, 64) and embed.untyped_storage()._cdata == head.untyped_storage()._cdata
    assert one["row"].shape == (10,) and one["row"].untyped_storage().nbytes() == 40_000
assert whole.embed.weight is whole.head.weight
print(type(kept["row"]).__name__, type(mapped["row"]).__name__, type(kept["ids"]).__name__)
try:
    torch.load("nowhere/best.pt")
except FileNotFoundError:
    print("goes on")
model.load_state_dict(kept["model"])
train(model)
"""


def test_data_that_is_loaded_before_the_model_is_memory_of_the_job(tmp_path: Path) -> None:
    """torch fixes the size of what it reads from a file, as of memory that is not its own; a mapped file is that."""
    saves = 'torch.save(torch.arange(5000), "table.pt")\n'
    (tmp_path / "save.py").write_text(_MODEL + saves)
    subprocess.run([sys.executable, "save.py"], cwd=tmp_path, check=True, timeout=240)
    loads = 'table = torch.load("table.pt")\nmapped = torch.load("table.pt", mmap=True)\ntrain(Tied())\n'
    real, dry = record_both(tmp_path, _MODEL + loads)
    assert dry.peak == real.peak


def test_checkpoint_on_disk_is_loaded_as_shapes_and_takes_what_it_takes(tmp_path: Path) -> None:
    """Storages are shared as in the file, small whole numbers are read, a mapped file is none of torch's memory: the
    peak of a job that keeps it all is the real one, to the byte. What the job does without a file is left to it."""
    (tmp_path / "save.py").write_text(_MODEL + _SAVES)
    subprocess.run([sys.executable, "save.py"], cwd=tmp_path, check=True, timeout=240)
    real = record_script(tmp_path, _MODEL + _LOADS, "--stop", name="real.memprof")
    assert real.stdout == "Tensor Tensor Tensor\ngoes on\n", real.stderr
    dry = record_script(tmp_path, _MODEL + _LOADS, "--dry-run", name="dry.memprof")
    assert dry.stdout == "FakeTensor FakeTensor Tensor\ngoes on\n", dry.stderr
    assert dry.peak == real.peak


_SAFE = """
from safetensors import safe_open
from safetensors.torch import load_file
model = nn.Linear(64, 64)
model.load_state_dict(load_file("run.safetensors"), assign=True)
with safe_open("run.safetensors", framework="pt") as file:
    assert set(file.keys()) == {"weight", "bias"}
    assert file.get_tensor("weight").shape == (64, 64)
    assert file.get_slice("weight")[:3].shape == (3, 64)
print(type(model.weight.data).__name__)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_safetensors_are_shapes_in_a_mapped_file(tmp_path: Path) -> None:
    """`load_file` and `safe_open` give shapes. Parameters that stay in the mapped file count, as updates write to them,
    and what is only read from it does not: the peak is the real run's, 16,640 bytes of weights and as many of gradients
    with 2,048 bytes of input and result at most."""
    pytest.importorskip("safetensors")
    import torch
    from safetensors.torch import save_file

    save_file(torch.nn.Linear(64, 64).state_dict(), tmp_path / "run.safetensors")
    real, dry = record_both(tmp_path, _MODEL + _SAFE)
    assert dry.stdout == "FakeTensor\n", dry.stderr
    assert dry.peak == real.peak
    assert 2 * 16_640 + 1024 <= dry.peak <= 2 * 16_640 + 2048


def test_a_slice_of_columns_takes_only_its_own_bytes_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library copies a slice to the device; what it is a slice of stays in the file."""
    safetensors = pytest.importorskip("safetensors")
    import torch
    from safetensors.torch import save_file
    from torch._subclasses.fake_tensor import FakeTensorMode

    from memprof.virtual.tensors.tensor_files import watch_safetensors

    save_file(torch.nn.Linear(64, 32).state_dict(), tmp_path / "run.safetensors")
    monkeypatch.setattr(safetensors, "safe_open", safetensors.safe_open)
    watch_safetensors(lambda name: nullcontext(), lambda: True)
    with FakeTensorMode(), safetensors.safe_open(tmp_path / "run.safetensors", "pt", device=0) as file:
        part = file.get_slice("weight")[:, :16]
    assert (part.device.type, tuple(part.shape), part.untyped_storage().nbytes()) == ("cuda", (32, 16), 32 * 16 * 4)


_IN_THREADS = """
from concurrent.futures import ThreadPoolExecutor
from safetensors import safe_open
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
def read(name):
    with safe_open("run.safetensors", framework="pt") as file:
        part = file.get_slice(name)[...].to(torch.float64)
    return name, (part + torch.ones(64, dtype=torch.float64)).to(torch.float32)
with safe_open("run.safetensors", framework="pt") as file, ThreadPoolExecutor(4) as pool:
    state = dict(task.result() for task in [pool.submit(read, name) for name in file.keys()])
    ends = pool.submit(lambda: 1 / 0)
print({type(tensor).__name__ for tensor in state.values()}, type(ends.exception()).__name__)
model.load_state_dict(state, assign=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_pool_of_threads_sees_the_device(tmp_path: Path) -> None:
    """By its number too, as transformers places weights that it loads with a map of devices."""
    script = """
from concurrent.futures import ThreadPoolExecutor
model = nn.Linear(64, 64).cuda()
with ThreadPoolExecutor(4) as pool:
    weight = pool.submit(lambda: torch.zeros(64, 64).to(device=0)).result()
    bias = pool.submit(lambda: torch.zeros(64, device="cuda")).result()
print(weight.device, bias.device)
model.load_state_dict({"weight": weight, "bias": bias}, assign=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    ended = record_script(tmp_path, _MODEL + script, "--dry-run", "--device", "rtx4090")
    assert (ended.returncode, ended.stdout) == (0, "cuda:0 cuda:0\n"), ended.stderr


def test_weights_that_a_pool_of_threads_reads_are_shapes(tmp_path: Path) -> None:
    """As transformers reads them; the tasks' errors are theirs."""
    pytest.importorskip("safetensors")
    import torch
    from safetensors.torch import save_file

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    save_file(model.state_dict(), tmp_path / "run.safetensors")
    real = record_script(tmp_path, _MODEL + _IN_THREADS, name="real.memprof")
    dry = record_script(tmp_path, _MODEL + _IN_THREADS, "--dry-run", name="dry.memprof")
    assert (real.stdout, dry.stdout) == ("{'Tensor'} ZeroDivisionError\n", "{'FakeTensor'} ZeroDivisionError\n")
    assert dry.peak == real.peak


_MISSING = """
def resume():
    return torch.load("nowhere/best.pt")

how = sys.argv[1]
if how == "before":
    resume()
model = Tied()
if how == "after":
    try:
        resume()
    except OSError as error:
        raise RuntimeError("no checkpoint") from error
"""


@pytest.mark.parametrize("how", ["before", "after"])
def test_missing_checkpoint_is_named_with_the_way_to_go_on(tmp_path: Path, how: str) -> None:
    """One sentence and status 125, whether it is loaded before or after the model is made."""
    ended = record_script(tmp_path, _MODEL + _MISSING, "--dry-run", words=(how,), name="dry.memprof")
    assert ended.returncode == 125
    line = 1 + (_MODEL + _MISSING).splitlines().index('    return torch.load("nowhere/best.pt")')
    assert f"job.py:{line} loads nowhere/best.pt, which does not exist" in ended.stderr
    assert "same names and shapes" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "dry.memprof").exists()


_RANKS = """
import torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
dist.init_process_group("gloo", rank=0, world_size=1)
model = Tied()
total = torch.zeros(4) + model.head.weight.sum()
dist.all_reduce(total)
dist.barrier()
print("reduced", flush=True)
"""


def test_a_world_of_one_works(tmp_path: Path) -> None:
    """Collectives of a single rank are dry-run."""
    ended = record_script(tmp_path, _MODEL + _RANKS, "--dry-run", name="dry.memprof")
    assert ended.stdout == "reduced\n"
    assert "Traceback" not in ended.stderr


def test_job_without_a_model_is_told_that_it_ran_for_real(tmp_path: Path) -> None:
    """A message about where a dry run begins, and a status that is not 0: nothing was recorded."""
    ended = record_script(
        tmp_path, "import torch\nprint(torch.ones(2).sum().item())\n", "--dry-run", name="dry.memprof"
    )
    assert ended.returncode == 3
    assert ended.stdout == "2.0\n"
    assert "a dry run begins with the first of them" in ended.stderr
    assert not (tmp_path / "dry.memprof").exists()


_GOES_BACK = """
import shutil, copy, io, pickle
model = Tied()
optimizer = torch.optim.Adam(model.parameters())
for step in range(6):
    model(torch.randint(0, 100, (4, 8))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with open("best.pt", "wb") as file:
        torch.save(model, file)
    with open("best.pt", "rb") as file:
        best = torch.load(file, weights_only=False)
    memory = io.BytesIO()
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, memory)
    memory.seek(0)
    kept = torch.load(memory, map_location="cpu", weights_only=False)
    for one in (best, kept["model"], pickle.loads(pickle.dumps(model))):
        assert type(one) is Tied and one is not model and one.embed.weight is not model.embed.weight
        assert one.embed.weight is one.head.weight and isinstance(one.head.weight, nn.Parameter)
        assert one(torch.randint(0, 100, (2, 8))).shape == (2, 8, 100)
    model.load_state_dict(best.state_dict())
    optimizer.load_state_dict(kept["optimizer"])
    again = pickle.loads(pickle.dumps(optimizer))
    assert [part["exp_avg"].shape for part in again.state.values()] == [(100, 64)]
    columns = pickle.loads(pickle.dumps(model.embed.weight.detach().t()))
    assert columns.shape == (64, 100) and columns.stride() == (1, 64)
    alias = copy.copy(model.embed.weight)
    assert alias.untyped_storage()._cdata == model.embed.weight.untyped_storage()._cdata
print("done", os.path.getsize("best.pt"))
torch.save(model.state_dict(), "last.tmp")
os.replace("last.tmp", "last.pt")
model.load_state_dict(torch.load("last.pt"))
os.makedirs("kept", exist_ok=True)
os.link("last.pt", "best.pt2")
assert shutil.copy2("last.pt", "kept") and shutil.copyfile("last.pt", "again.pt") and shutil.copy(__file__, "kept")
for name in ("best.pt2", "kept/last.pt", "again.pt"):
    model.load_state_dict(torch.load(name))
os.remove("last.pt")
torch.save(model.state_dict(), "last.pt")
with open("other", "w") as file:
    file.write("a file that is there")
os.replace("other", "last.pt")
os.remove("last.pt")
assert not os.path.exists("last.pt")
"""


def test_saved_models_are_loaded_again_from_open_files_and_pickles(tmp_path: Path) -> None:
    """A model saved whole, to a file or to memory, comes back with its shapes; its file may be moved and deleted."""
    dry = record_script(tmp_path, _MODEL + _GOES_BACK, "--dry-run", "--skip", "0", "--steps", "9", name="dry.memprof")
    assert (dry.returncode, dry.stdout) == (0, "done 0\n"), dry.stderr


_READS_FILE = """
model = Tied()
train(model)
torch.save(model.state_dict(), "last.pt")
open("last.pt", "rb").read()
"""


def test_a_checkpoint_that_was_left_out_is_named_where_the_job_misses_it(tmp_path: Path) -> None:
    """A job that reads the file which torch.save would have written ends with 125 and a message."""
    words = ("--dry-run", "--skip", "0", "--steps", "9")
    ended = record_script(tmp_path, _MODEL + _READS_FILE, *words, name="dry.memprof")
    assert ended.returncode == 125
    assert "reads the file last.pt, which torch.save has not written" in ended.stderr
    assert "Traceback" not in ended.stderr


_SHARES = """
import torch, torch.multiprocessing as mp

def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches.split(2):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    model = torch.nn.Linear(4, 2).share_memory()
    process = mp.get_context("spawn").Process(target=train, args=(model, torch.ones(8, 4)))
    process.start()
    process.join()
    print("child", process.exitcode)
"""


def test_a_spawned_process_trains_a_shared_model(tmp_path: Path) -> None:
    """A model and data in shared memory reach a spawned process, and the model's parameters are trained there."""
    dry = record_script(tmp_path, _SHARES, "--dry-run", "--skip", "0", "--steps", "9", name="dry.memprof")
    assert (dry.returncode, dry.stdout) == (0, "child 0\n"), dry.stderr
