"""Dry runs of jobs with sparse tensors: real runs have the same peak, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memprof.virtual.device.kernels.formats import sizes_before, sizes_within
from memprof.virtual.tensors.fakes import count_places, spread_pattern
from memprof.virtual.tensors.sparse_operators import _key
from tests.recorder.recorded import record_both, record_script

_EMBEDDINGS = """
import torch
from torch import nn
DEVICE = "cpu"

torch.manual_seed(0)
words, bags = nn.Embedding(300, 16, sparse=True), nn.EmbeddingBag(200, 16, sparse=True)
words, bags, out = words.to(DEVICE), bags.to(DEVICE), nn.Linear(16, 4).to(DEVICE)
optimizers = [
    torch.optim.SparseAdam(words.parameters()),
    torch.optim.SGD(bags.parameters(), lr=0.1, momentum=0.9),
    torch.optim.Adagrad(out.parameters()),
]
for step in range(6):
    for _ in range(2):  # gradients are accumulated
        ids, tags = torch.randint(300, (32, 5)).to(DEVICE), torch.randint(200, (32, 3)).to(DEVICE)
        (out(words(ids).mean(1) + bags(tags)).square().mean()).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
"""

_GRAPH = """
import torch
from torch import nn
DEVICE = "cpu"

torch.manual_seed(0)
nodes, edges = 200, 900
places = torch.randint(nodes, (2, edges))
adjacency = torch.sparse_coo_tensor(places, torch.rand(edges), (nodes, nodes)).coalesce().to(DEVICE)
rows = adjacency.to_sparse_csr()
model, out = nn.Linear(24, 16).to(DEVICE), nn.Linear(16, 4).to(DEVICE)
optimizer = torch.optim.Adam([*model.parameters(), *out.parameters()])
features, labels = torch.randn(nodes, 24).to(DEVICE), torch.randint(4, (nodes,)).to(DEVICE)
for _ in range(6):
    hidden = torch.sparse.mm(adjacency, torch.relu(model(features)))
    hidden = rows @ hidden
    weights = torch.rand(edges, device=DEVICE, requires_grad=True)
    learned = torch.sparse_coo_tensor(places.to(DEVICE), weights, (nodes, nodes))
    hidden = hidden + learned @ hidden
    loss = nn.functional.cross_entropy(out(hidden), labels) + torch.sparse.sum(learned, 1).to_dense().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

_UNKNOWN = """
import torch
from torch import nn

words = nn.Embedding(100, 8, sparse=True)
optimizer = torch.optim.SparseAdam(words.parameters())
for _ in range(6):
    ids = words.weight.sum(1).topk(60)[1].repeat(3)  # 180 ids, of which no value is known
    words(ids).sum().backward()
    words(ids[:30]).sum().backward()
    print("FEW", torch.autograd.grad(words(ids[:30]).sum(), words.weight)[0].coalesce()._values().shape[0])
    few = [torch.autograd.grad(words(part).sum(), words.weight)[0] for part in (ids[:30], ids[30:50])]
    print("BOTH", few[0].add(few[1]).coalesce()._values().shape[0])
    gradient = words.weight.grad.coalesce()
    print("ROWS", gradient._values().shape[0], gradient.is_coalesced())
    optimizer.step()
    optimizer.zero_grad()
"""

_CLIPPED = """
import torch
from torch import nn

words = nn.Embedding(100, 8, sparse=True)
optimizer = torch.optim.SparseAdam(words.parameters())
for _ in range(6):
    words(torch.randint(100, (16,))).sum().backward()
    try:
        nn.utils.clip_grad_norm_(words.parameters(), 1.0)
    except NotImplementedError as error:
        print("REFUSED", str(error)[:45])
    optimizer.step()
    optimizer.zero_grad()
"""

_NONZERO = """
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    places = torch.tensor([[0, 1, 1, 3], [2, 0, 0, 3]])  # one of them twice
    dense = torch.sparse_coo_tensor(places, torch.ones(4), (4, 4)).to_dense()
    dense = dense / dense.sum(1).clamp(min=1)
    print("PLACES", len(dense.nonzero()), len(dense[dense > 0]))
    model(dense).sum().backward()
    optimizer.step()
"""


_WRITTEN = """
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
counts = torch.zeros(3, dtype=torch.int64)
for _ in range(6):
    counts.add_(torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1, 5]), (3,)))
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    print("COUNTS", counts.tolist())
"""


_DENSE = """
import torch
DEVICE = "cuda"

model = torch.nn.Linear(4, 4).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
places = torch.tensor([[0, 1, 1, 3], [2, 0, 0, 3]]).to(DEVICE)
for _ in range(6):
    matrix = torch.sparse_coo_tensor(places, model(torch.randn(4, 4).to(DEVICE)).detach()[0], (4, 4))
    with torch.inference_mode():
        print("INFERENCE", tuple(matrix.to_dense().shape))
    try:
        torch.mm(matrix, torch.ones(4, 2, dtype=torch.float64, device=DEVICE))
    except RuntimeError as error:
        print("REFUSED", error)
    large = torch.sparse_coo_tensor(places, matrix._values(), (30000, 30000)).to_dense()
    print("LARGE", tuple(large.shape), len(large.nonzero()))
    model(torch.randn(2, 4).to(DEVICE)).sum().backward()
    optimizer.step()
"""


def test_dense_copies_and_types_on_a_virtual_gpu(tmp_path: Path) -> None:
    """Copies in inference mode, copies of 3.35 GiB, and torch's own error for a product of two types."""
    ended = record_script(tmp_path, _DENSE, "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    assert "INFERENCE (4, 4)" in ended.stdout
    assert "REFUSED expected scalar type Float but found Double" in ended.stdout
    assert "LARGE (30000, 30000) 3" in ended.stdout
    assert int(ended.trace.step(1).memory.allocated_bytes.max()) >= 4 * 30000**2


def test_what_a_product_takes_depends_on_the_rows_of_its_matrix() -> None:
    """Equal elements in matrices of two heights, and one that is coalesced: three measurements, not one."""
    places, values = torch.tensor([[0, 1], [1, 0]]), torch.ones(2)
    matrices = [torch.sparse_coo_tensor(places, values, size, check_invariants=True) for size in ((2, 2), (9, 2))]
    assert len({_key([each, torch.ones(2, 3)]) for each in (*matrices, matrices[0].coalesce())}) == 3


def test_operators_on_data_write_once(tmp_path: Path) -> None:
    """Measuring what a kernel takes leaves the job's data alone."""
    ended = record_script(tmp_path, _WRITTEN, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert "COUNTS [1, 0, 5]\nCOUNTS [2, 0, 10]" in ended.stdout


@pytest.mark.parametrize("job", [_EMBEDDINGS, _GRAPH], ids=["embeddings", "graph"])
def test_peaks_are_those_of_a_real_run(tmp_path: Path, job: str) -> None:
    """Gradients, their sums, optimizers' steps, products and what kernels take within them."""
    real, dry = record_both(tmp_path, job)
    peaks = [int(each.trace.step(2).memory.allocated_bytes.max()) for each in (real, dry)]
    assert peaks[0] == peaks[1]
    assert not any("upper bound" in note for note in dry.trace.manifest.notes)


@pytest.mark.parametrize("job", [_EMBEDDINGS, _GRAPH], ids=["embeddings", "graph"])
def test_they_run_on_a_virtual_gpu(tmp_path: Path, job: str) -> None:
    """Indices and values are on the device, and their blocks are freed with them."""
    ended = record_script(tmp_path, job.replace('"cpu"', '"cuda"'), "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    first, second = (ended.trace.step(number).memory.allocated_bytes for number in (1, 2))
    assert int(second.max()) < 2 * int(first.max())
    storages = ended.trace.step(2).storages
    assert "int64" in set(storages.dtype[storages.device == "cuda:0"])


def test_unknown_indices_differ_as_far_as_possible(tmp_path: Path) -> None:
    """180 indices of 100 rows: all rows have a gradient; of 30, 30, with 20 more 50. The notes call it a bound."""
    ended = record_script(tmp_path, _UNKNOWN, "--dry-run")
    assert "ROWS 100 True" in ended.stdout
    assert "FEW 30" in ended.stdout
    assert "BOTH 50" in ended.stdout
    notes = ended.trace.manifest.notes
    assert any("upper bounds" in note and "_coalesce" in note for note in notes)


def test_what_torch_refuses_is_refused(tmp_path: Path) -> None:
    """A norm of sparse gradients raises torch's own error, which the job catches."""
    ended = record_script(tmp_path, _CLIPPED, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert "REFUSED Could not run 'aten::linalg_vector_norm'" in ended.stdout


def test_a_dense_copy_has_as_many_nonzero_elements_as_places(tmp_path: Path) -> None:
    """Three places, of four elements."""
    ended = record_script(tmp_path, _NONZERO, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert "PLACES 3 3" in ended.stdout


def test_spread_places_are_as_many_as_there_can_be() -> None:
    """Of 10 elements in 2 x 3 places 6 differ, of 4 all do."""
    for count, differ in ((10, 6), (4, 4)):
        (indices,) = spread_pattern((2, 3), count).indices
        assert indices.shape == (2, count)
        assert (
            count_places(torch.sparse_coo_tensor(indices, torch.ones(count), (2, 3), check_invariants=True)) == differ
        )


def test_a_product_on_a_device_sorts_a_matrix_that_is_not_coalesced() -> None:
    """Two elements, one given twice, in a 4 x 5 matrix times 5 x 2: int32 rows and columns, a result in columns."""
    product = torch.ops.aten.mm.default
    matrix = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 0]]), torch.ones(3), (4, 5))
    right, result = torch.ones(5, 2), torch.ones(4, 2)
    coalesced = matrix.coalesce()
    assert sizes_within(product, [coalesced, right], result, 0) == [[32, 20, 8], [32, 20, 8, 32]]
    # Three positions of 8 bytes: flat, twice, and sorted; then indices and values of the sorted matrix stay.
    expected = [[32, 24, 24, 24, 48], [32, 32, 8, 20, 8], [32, 32, 8, 20, 8, 32]]
    assert sizes_within(product, [matrix, right], result, 0) == expected
    assert sizes_before(torch.ops.aten._coalesce.default, [matrix]) == [24, 24, 24, 48]
