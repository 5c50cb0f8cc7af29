"""Values that a dry run knows for certain, though it computes nothing: what ends the loops of libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memprof.virtual.sizes.bounds import upper_bound
from tests.recorder.recorded import record_both, record_script
from tests.virtual.on_a_card import allocated

#: A rollout as libraries write it: it ends at a token that is never known, or at a length.
_JOB = """
import torch
from torch import nn

device = DEVICE
model = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 16)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    with MODE:
        ids = torch.randint(3, 16, (4, 2), device=device)
        unfinished = torch.ones(4, dtype=torch.long, device=device)
        while True:
            token = torch.multinomial(model(ids)[:, -1].softmax(-1), 1).squeeze(1) * unfinished
            ids = torch.cat([ids, token[:, None]], dim=-1)
            is_done = torch.full((4,), False, device=device, dtype=torch.bool)
            is_done = is_done | torch.full((4,), ids.shape[1] >= 8, device=device, dtype=torch.bool)
            is_done = is_done | torch.isin(ids[:, -1], torch.tensor([99], device=device))
            unfinished = unfinished & ~is_done
            if unfinished.max() == 0:
                break
            assert ids.shape[1] < 8, "the rollout goes on behind its last token"
    print("LENGTH", ids.shape[1])
    model(ids.clone()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

_WRITTEN = """
import torch
model = torch.nn.Linear(4, 4).cuda()
unknown = torch.argmax(model(torch.randn(8, 4).cuda()), dim=1)
marks = torch.zeros(8, dtype=torch.int64, device="cuda")
print("BEFORE", marks.max().item())
marks[3:5].copy_(unknown[:2])
print("AFTER", marks.max().item())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.randn(8, 4).cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("mode", ["torch.no_grad()", "torch.inference_mode()"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rollout_ends_at_its_length(tmp_path: Path, device: str, mode: str) -> None:
    """Whichever token ends it is unknown; that all sequences have their full length is not."""
    options = ("--device", "rtx4090") if device == "cuda" else ()
    job = _JOB.replace("DEVICE", repr(device)).replace("MODE", mode)
    ended = record_script(tmp_path, job, "--dry-run", *options)
    assert ended.returncode == 0, ended.stderr
    assert "LENGTH 8" in ended.stdout


def test_a_value_is_uncertain_once_written_to(tmp_path: Path) -> None:
    """Zeros are known to be zeros until something unknown is copied into a part of them."""
    ended = record_script(tmp_path, _WRITTEN, "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    assert "BEFORE 0" in ended.stdout
    assert "AFTER 1" in ended.stdout  # the placeholder


_GRAPHS = """
import torch

model = torch.nn.Linear(16, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    graphs = torch.tensor([0, 0, 1, 1, 1, 2, 4]).to("cuda")
    labels = torch.tensor([3, -100, 2, -100, 1, -100, 0], device="cuda")
    rows = model(torch.randn(7, 16).to("cuda"))
    count = int(graphs.max()) + 1
    pooled = torch.zeros(count, 8, device="cuda").index_add(0, graphs, rows)
    kept = labels.masked_select(labels != -100)
    places = (labels != -100).nonzero()
    chosen = rows[labels != -100]
    print("SIZES", pooled.shape[0], kept.shape[0], places.shape[0], chosen.shape[0], kept.tolist())
    print("LOSS", torch.nn.functional.mse_loss(torch.randn(4), torch.randn(4)).device)
    print("PARTS", (labels.chunk(2)[1] < 0).nonzero().shape[0], int(graphs.unbind()[6]))
    (pooled.sum() + chosen.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_data_moved_to_a_device_keeps_its_values(tmp_path: Path) -> None:
    """Five graphs, the largest index being 4; four labels that are not masked out, at four places; and their parts."""
    ended = record_script(tmp_path, _GRAPHS, "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    assert "SIZES 5 4 4 4 [3, 2, 1, 0]" in ended.stdout
    assert "PARTS 1 4" in ended.stdout
    assert "LOSS cpu" in ended.stdout


_MASKED = """
import torch

model = torch.nn.Linear(16, 8)
optimizer = torch.optim.AdamW(model.parameters())
labels = torch.arange(64) % 4
for step in range(6):
    rows = model(torch.randn(64, 16))
    chosen, single = rows[labels == 1], rows[:, 0].masked_select(labels > 1)
    print("SIZES", chosen.shape[0], single.shape[0])
    (chosen.sum() + single.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_mask_with_data_selects_as_many_as_in_a_real_run(tmp_path: Path) -> None:
    """Of 64 labels 0 to 3, 16 are 1 and 32 are larger; the report has no note of upper bounds."""
    ended = record_script(tmp_path, _MASKED, "--dry-run")
    assert "SIZES 16 32" in ended.stdout
    assert not [note for note in ended.trace.manifest.notes if "upper bounds" in note]


#: What torch_geometric's to_dense_batch does with graphs of all sizes, and a mask written to at unknown places.
_DENSE = """
import torch

device = DEVICE
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    graphs = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3]).to(device)
    rows = model(torch.randn(10, 8).to(device))
    count = int(graphs.max()) + 1
    sizes = graphs.new_zeros(count).scatter_add_(0, graphs, graphs.new_ones(10))
    most = int(sizes.max())
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    places = torch.arange(10, device=device) - starts[graphs] + graphs * most
    places = torch.where(places < count * most, places, count * most)
    mask = torch.zeros(count * most + 1, dtype=torch.bool, device=device)
    mask[places] = 1
    dense = rows.new_zeros(count * most + 1, 8)
    dense[places] = rows
    chosen = dense[mask]
    padded = torch.arange(4, device=device)[None, :] < sizes[:, None]
    parts = dense[:16].view(4, 4, 8).masked_select(padded.unsqueeze(-1))
    unknown = torch.zeros(10, dtype=torch.bool)
    unknown[rows.argmax(0).cpu()] = True
    print("SIZES", count, most, chosen.shape[0], parts.shape[0], len(unknown.nonzero()), int(graphs.max()))
    ((chosen - rows).square().sum() + parts.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_that_a_job_counts_in_place_are_true(tmp_path: Path, device: str) -> None:
    """Four graphs of up to four nodes: 10 of 16 places are filled; at places that are not known, up to all are."""
    options = ("--device", "rtx4090") if device == "cuda" else ()
    done = record_script(tmp_path, _DENSE.replace("DEVICE", repr(device)), "--dry-run", *options)
    assert done.returncode == 0, done.stderr
    assert "SIZES 4 4 10 80 10 3" in done.stdout


_SPEECH = """
import torch
from torch.nn import functional

model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 20)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters())
labels = torch.randint(1, 20, (4, 12))
for _ in range(6):
    scores = model(torch.randn(50, 4, 8).to(DEVICE)).log_softmax(-1)
    targets = labels.to(DEVICE)
    lengths = (targets > 0).sum(-1)
    flat = targets.masked_select(targets > 0)
    loss = functional.ctc_loss(scores, flat, torch.full((4,), 50).to(DEVICE), lengths)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_ctc_loss_is_dry_run_as_it_is_trained(tmp_path: Path) -> None:
    """Its table has a row per moment and two columns per letter: 4 x 50 x 25 numbers; the peak is the recorded one."""
    job = _SPEECH.replace("DEVICE", "'cpu'")
    real, dry = record_both(tmp_path, job)
    assert 4 * 50 * 25 * 4 in dry.step.storages.requested_bytes.tolist()
    assert dry.peak == real.peak


def test_a_ctc_loss_is_dry_run_on_a_device(tmp_path: Path) -> None:
    """The lengths of its targets are not computed there: all are taken to be of the same length."""
    ended = record_script(tmp_path, _SPEECH.replace("DEVICE", "'cuda'"), "--dry-run", "--device", "rtx4090")
    storages = ended.step.storages
    assert 4 * 50 * 25 * 4 in storages.requested_bytes[storages.device == "cuda:0"].tolist()


def test_lengths_of_a_ctc_loss_may_be_on_the_processor(tmp_path: Path) -> None:
    """Tensors or numbers: the longest target of 7 has 15 columns."""
    script = """
from torch.nn.functional import ctc_loss
scores = torch.randn(50, 4, 8, device="cuda", requires_grad=True)
targets = torch.ones(4, 12, dtype=torch.int64, device="cuda")
START
ctc_loss(scores, targets, torch.full((4,), 50), torch.tensor([3, 7, 2, 1])).backward()
ctc_loss(scores, targets, [50] * 4, [3, 7, 2, 1])
"""
    assert allocated(script, tmp_path).count(12_288) == 3  # 4 x 50 x 15 numbers, and those of the backward


_WIDTHS = """
import torch
from torch import nn

class Staged(nn.Module):
    def __init__(self):
        super().__init__()
        exponents = torch.round(torch.log((torch.arange(6, dtype=torch.float32) * 36.0 + 24) / 24) / 0.9)
        widths = (torch.round(24 * torch.pow(2.5, exponents) / 8) * 8).int().tolist()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, len(widths))]
        self.layers = nn.ModuleList()
        before = 16
        for width, rate in zip(widths, rates):
            self.layers.append(nn.Sequential(nn.Linear(before, width), nn.Dropout(rate) if rate else nn.Identity()))
            before = width
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

model = Staged()
print([tuple(each.shape) for each in model.parameters()], model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.ones(8, 16)).sum().backward()
    optimizer.step()
"""


def test_widths_and_rates_that_a_model_computes_of_ranges_are_true(tmp_path: Path) -> None:
    """As regnets compute their stages, and vision transformers their rates of dropped paths: layers depend on them."""
    real, dry = record_both(tmp_path, _WIDTHS)
    assert dry.stdout == real.stdout
    assert dry.peak == real.peak


@pytest.mark.parametrize("driver", [None, "gels", "gelsd", "gelss"])
@pytest.mark.parametrize(
    ("left", "right"),
    [((8, 5), (8, 3)), ((4, 8, 5), (4, 8, 3)), ((5, 8), (5, 3)), ((5, 5), (5, 3)), ((8, 5), (8,)), ((4, 8, 5), (4, 8))],
    ids=str,
)
def test_least_squares_are_those_of_matrices_of_full_rank(left, right, driver):
    """Shapes, strides and storages of the four results, which depend on the solver."""
    func, arguments = torch.ops.aten.linalg_lstsq.default, (torch.randn(left), torch.randn(right))
    made, bound = func(*arguments, driver=driver), upper_bound(func, arguments, {"driver": driver})
    assert [layout(tensor) for tensor in bound] == [layout(tensor) for tensor in made]


def layout(tensor):
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("options", [(), (True, True), (False, False, 0)], ids=str)
def test_unique_values_are_bounded_by_all_being_different(options):
    """With values that all differ, the bound is what torch makes."""
    func, values = torch.ops.aten.unique_consecutive.default, torch.arange(12.0).view(3, 4)
    made, bound = func(values, *options), upper_bound(func, (values, *options), {})
    assert [layout(tensor) for tensor in bound] == [layout(tensor) for tensor in made]
    func = torch.ops.aten.unique_dim.default
    made, bound = func(values, 0), upper_bound(func, (values, 0), {})
    assert [layout(tensor) for tensor in bound] == [layout(tensor) for tensor in made]


_SKIPS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x):
        taken = []
        for place, layer in enumerate(self.layers):
            kept = torch.rand(1)
            if kept > 0.5 and torch.rand([]).item() > 0.1:
                x = x + layer(x)
                taken.append(place)
        print("TAKEN", taken)
        return x

torch.manual_seed(5)
model = Net()
big = torch.randn(MORE, 1000, 1000)
scale = torch.rand(1)
scale.zero_()
assert not scale > 0.1
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    (model(torch.randn(4, 16)).square().mean() + 0 * model.layers[0].weight.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("more", [1, 40])
def test_layers_are_skipped_as_in_a_real_run(tmp_path: Path, more: int) -> None:
    """One random number decides as in a real run; after more draws than a dry run makes, both outcomes still occur."""
    real, dry = record_both(tmp_path, _SKIPS.replace("MORE", str(more)))
    lines = [[line for line in done.stdout.splitlines() if "TAKEN" in line] for done in (real, dry)]
    assert 2 <= len(lines[1]) <= len(lines[0])
    if more == 1:
        assert lines[1] == lines[0][: len(lines[1])]
    assert len({*lines[1]}) > 1


_MASKS = """
import torch
model = torch.nn.Linear(300, 400)
model.weight.data = torch.tensor([[0.5] * 300] * 400)
model = model.to(DEVICE)
print("ASSIGNED", model.weight.device.type, tuple(model.weight.shape))
mask = torch.zeros_like(model.weight.view(1, -1))
places = torch.randperm(model.weight.numel())[:500].to(DEVICE)
mask = mask.scatter_(1, places.unsqueeze(0), torch.ones_like(places, dtype=mask.dtype).unsqueeze(0)).view(400, 300)
rows, columns = torch.where(mask == 1.0)
print("PLACES", len(rows), mask.nonzero().shape, (mask > 0).nonzero().shape, model.weight[mask.bool()].shape)
chosen, others = (torch.zeros(100_000, dtype=torch.uint8, device=DEVICE) for _ in range(2))
chosen[torch.randperm(100_000)[:30].to(DEVICE)] = 1
others[torch.randperm(100_000)[:20].to(DEVICE)] = 1
for marks in (chosen, chosen | others, torch.cat([chosen, others])):
    print("CHOSEN", len(torch.where(marks)[0]))
print("REPEATED", len(torch.where(others.view(2, -1)[:1] | chosen.view(2, -1))[0]))
table = torch.zeros(400, 300, device=DEVICE)
table[:, places[:7] % 300] = 1
print("COLUMNS", len(table.nonzero()))
table = torch.zeros(400, 300, device=DEVICE)
table[model.weight[:, 0] > 0, places[:3] % 300] = 1
print("PAIRS", len(table.nonzero()))
scale = torch.nn.Parameter(torch.ones(40, device=DEVICE))
scale.data = torch.full((40,), 2.0, device=DEVICE)
print("TWOS", len((scale == 1).nonzero()), len((scale == 2).nonzero()))
mask.copy_(model.weight)
print("WRITTEN", len(mask.nonzero()), len((mask == 0).nonzero()) in (0, 120_000))
chosen = torch.zeros(400, dtype=torch.bool, device=DEVICE)
chosen[100:350] = True
rows = model.weight[torch.ones(400, dtype=torch.uint8, device=DEVICE)]
rows.sum().backward()
print("BYTES", rows.shape)
padded = torch.zeros(4, 400, device=DEVICE)
padded[:, chosen] = model(torch.ones(4, 300).to(DEVICE))[:, :250]
padded.sum().backward()
print("PLACED", padded[:, chosen].shape)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(4, 300).to(DEVICE)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_mask_of_scattered_ones_selects_as_many_as_were_scattered(tmp_path: Path, device: str) -> None:
    """Sparse adapters choose random places of a weight; a mask that is written to otherwise has an unknown number.

    As many are true as values are written through it: LoRA pads a layer's output so.
    """
    options = ("--device", "rtx4090") if device == "cuda" else ()
    done = record_script(tmp_path, _MASKS.replace("DEVICE", repr(device)), "--dry-run", *options)
    assert done.returncode == 0, done.stderr
    assert f"ASSIGNED {device} (400, 300)" in done.stdout
    assert "PLACES 500 torch.Size([500, 2]) torch.Size([500, 2]) torch.Size([500])" in done.stdout
    assert [line for line in done.stdout.splitlines() if "CHOSEN" in line] == ["CHOSEN 30", "CHOSEN 50", "CHOSEN 50"]
    assert "REPEATED 100000" in done.stdout  # not followed
    assert "COLUMNS 2800" in done.stdout
    assert "PAIRS 400" in done.stdout  # of a mask whose number is not known: at most one per row
    assert "TWOS 0 40" in done.stdout
    assert "WRITTEN 120000 True" in done.stdout
    assert "BYTES torch.Size([400, 300])" in done.stdout
    assert "PLACED torch.Size([4, 250])" in done.stdout


_DETECTION = """
import torch

@torch.library.custom_op("torchvision::nms", mutates_args=())
def nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    raise NotImplementedError

@nms.register_fake
def _(dets, scores, iou_threshold):
    return dets.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)

@torch.library.custom_op("mine::most", mutates_args=())
def most(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError

@most.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(SIZE))

model = torch.nn.Linear(8, 4).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    boxes = model(torch.randn(50, 8, device=DEVICE))
    kept = boxes[nms(boxes.detach(), boxes.detach()[:, 0], 0.5)]
    print("KEPT", len(kept), len(most(boxes.detach())))
    kept.sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_suppression_keeps_all_boxes_and_declared_sizes_are_the_largest(tmp_path: Path, device: str) -> None:
    """Upper bounds, which the notes name."""
    job = _DETECTION.replace("SIZE", "max=30").replace("DEVICE", repr(device))
    options = () if device == "cpu" else ("--device", "rtx4090")
    done = record_script(tmp_path, job, "--dry-run", *options)
    assert done.returncode == 0, done.stderr
    assert "KEPT 50 30" in done.stdout
    (note,) = [note for note in done.trace.manifest.notes if "upper bounds" in note]
    assert "torchvision.nms.default at job.py" in note
    assert "mine.most.default at job.py" in note


def test_an_operator_without_a_largest_size_is_refused_with_the_way_to_state_it(tmp_path: Path) -> None:
    """Status 125, and where to write it."""
    done = record_script(tmp_path, _DETECTION.replace("SIZE", "").replace("DEVICE", "'cpu'"), "--dry-run")
    assert done.returncode == 125
    assert "mine::most cannot be dry-run" in done.stderr
    assert 'new_dynamic_size(max=...)`, in the function registered with @torch.library.register_fake("mine::most")' in (
        " ".join(done.stderr.split())
    )
