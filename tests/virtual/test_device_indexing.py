"""Blocks of indexed operators, sorts, casts and copies on a card: those of an H200 under torch 2.11 and CUDA 13."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.virtual.on_a_card import allocated, allocated_by_each

#: Of each job: what follows START, and the blocks that the H200 took, in bytes rounded up to 512.
_JOBS = {
    # wav2vec2's labels: how many there are, where they are, and themselves.
    "masked select": (
        "labels = torch.ones(4, 12, dtype=torch.int64, device='cuda')\nmask = labels > 0",
        "labels.masked_select(mask)",
        [4, 1, 768, 1023, 384],
    ),
    # torch-geometric removes loops: CUB counts 4,745 of more than 4,096 edges in blocks of all multiprocessors.
    "mask of a row": (
        "edges = torch.ones(2, 4745, dtype=torch.int64, device='cuda')\nmask = edges[0] > 0",
        "edges[:, mask]",
        [4, 21503, 37960, 1023, 75920],
    ),
    # Falcon's keys: the list becomes a tensor on the card.
    "list": ("x = torch.randn(4, 64, 6, 24, device='cuda')", "x[..., [-2], :]", [8, 24576]),
    # BART's labels begin with a number, which C++ fills in.
    "number": ("x = torch.zeros(4, 31, dtype=torch.int64, device='cuda')", "x[:, 0] = 2\nx == -100", [124]),
    # transformers' masks of padding: both indices are expanded to the same shape, and copied.
    "two indices": (
        (
            "mask = torch.ones(4, 64, dtype=torch.bool, device='cuda')\n"
            "rows = torch.arange(4, device='cuda')[:, None, None, None]\n"
            "columns = torch.arange(64, device='cuda')[None, None, None, :]"
        ),
        "mask[rows, columns]",
        [2048, 2048, 256],
    ),
    # BERT's types of tokens, which are expanded over the batch.
    "expanded indices of an embedding": (
        (
            "table = torch.randn(2, 96, device='cuda')\n"
            "types = torch.zeros(1, 64, dtype=torch.int64, device='cuda').expand(4, 64)"
        ),
        "torch.nn.functional.embedding(types, table)",
        [2048, 98304],
    ),
    # How many labels each row has: the sum is of 64-bit integers.
    "sum of a mask": ("mask = torch.ones(4, 12, dtype=torch.bool, device='cuda')", "mask.sum(-1)", [32, 384]),
    # Mixture of experts: tokens are sorted in place with one more block, and experts' counts scanned by CUB.
    "sort": ("x = torch.randint(4, (512,), device='cuda')", "torch.sort(x)", [4096, 4096, 4096]),
    "scan": (
        "x = torch.ones(4, dtype=torch.int32, device='cuda')",
        "torch.cumsum(x, 0, dtype=torch.int32)",
        [16, 1023],
    ),
    # torchao's float8 training: the largest element of a transposed matrix is that of a copy.
    "extremum of a transposed matrix": ("x = torch.randn(256, 256, device='cuda').t()", "torch.max(x)", [4, 262144]),
    # trl's log probabilities: elements of the mask are counted up to each.
    "masked scatter": (
        (
            "x = torch.zeros(4, 78, device='cuda')\n"
            "mask = torch.ones(4, 78, dtype=torch.bool, device='cuda')\n"
            "source = torch.randn(312, device='cuda')"
        ),
        "x.masked_scatter(mask, source)",
        [1248, 2496, 1279],
    ),
    # Scores that become both the product and the gradient (GPT-2, eager).
    "backward of a softmax": (
        (
            "x = torch.randn(4, 4, 64, 64, device='cuda', requires_grad=True)\n"
            "y = torch.softmax(x, -1)\ngradient = torch.randn_like(y)"
        ),
        "y.backward(gradient)",
        [262144, 262144],
    ),
    # Half types are cast before they are added up one after the other, unlike for a sum.
    "scan of another type": (
        "x = torch.ones(8, 64, dtype=torch.float16, device='cuda')",
        "torch.cumsum(x, 1, dtype=torch.float32), x.sum(1, dtype=torch.float32)",
        [2048, 2048, 32],
    ),
    # An expanded mask is copied, counted, and read.
    "masked select of rows": (
        "x = torch.ones(4, 12, device='cuda')\nmask = torch.ones(4, 1, dtype=torch.bool, device='cuda')",
        "x.masked_select(mask)",
        [48, 4, 1, 768, 1023, 192],
    ),
    # BERT's mask, which the kernels need as numbers.
    "attention with a mask of truths": (
        (
            "q = torch.randn(4, 4, 64, 24, device='cuda', requires_grad=True)\n"
            "mask = torch.ones(4, 1, 64, 64, dtype=torch.bool, device='cuda')"
        ),
        "torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)",
        [4, 4, 65536, 98304, 4096],
    ),
}


def _rounded(sizes: list[int]) -> list[int]:
    return [-(-size // 512) * 512 for size in sizes]


def test_blocks_are_those_of_a_gpu(tmp_path: Path) -> None:
    """The same bytes in the same order."""
    found = allocated_by_each({name: job[:2] for name, job in _JOBS.items()}, tmp_path)
    assert found == {name: _rounded(expected) for name, (_, _, expected) in _JOBS.items()}


#: Of each sort: the tensor, the operation, and the bytes of its results and of what it takes beside them.
_SORTS = {
    # Two rows are sorted in place with the positions 0 and 1, whatever their width.
    "short": ("torch.randint(4, (2, 8192), device='cuda')", "torch.sort(x, dim=0)", [131072, 131072, 16]),
    "short, stable": (
        "torch.randint(4, (2, 8192), device='cuda')",
        "torch.sort(x, dim=0, stable=True)",
        [131072, 131072, 16],
    ),
    # 128 rows: 4 and 8 bytes an element, positions of 8, and CUB's copies of keys and positions.
    "segments": (
        "torch.randn(128, 8192, device='cuda')",
        "torch.sort(x, descending=True)",
        [4 << 20, 8 << 20, 8 << 20, (12 << 20) + 255],
    ),
    "segments, bfloat16": (
        "torch.randn(128, 8192, device='cuda', dtype=torch.bfloat16)",
        "torch.argsort(x, stable=True)",
        [2 << 20, 8 << 20, 8 << 20, (10 << 20) + 255],
    ),
    # 127 rows: pairs of row and position twice, sorted keys, and CUB's copies with 4 histograms of 2,048 bytes and
    # 1,024 bytes for each 4,608 of 127 x 8,192 elements, which make 226 tiles.
    "fewer rows": (
        "torch.randn(127, 8192, device='cuda')",
        "torch.msort(x.t())",
        [127 << 15, 127 << 16, 127 << 16, 127 << 16, 127 << 15, 127 * 12 * 8192 + 4 * 2048 + 1024 * 226 + 511],
    ),
    # One row of 8 bytes, two tiles: its positions, and CUB's copies of both.
    "one row": (
        "torch.randint(4, (8192,), device='cuda')",
        "torch.sort(x)",
        [65536, 65536, 65536, 16 * 8192 + 8 * 2048 + 2 * 1024 + 511],
    ),
    # Columns are copied, and the sorted ones of both results, too.
    "columns": (
        "torch.randn(8192, 128, device='cuda')",
        "torch.sort(x, dim=0)",
        [4 << 20, 8 << 20, 4 << 20, 4 << 20, 8 << 20, 8 << 20, (12 << 20) + 255],
    ),
    # More than 4,096 of each row: both results in order, and what sorting these takes.
    "topk": (
        "torch.randn(128, 16384, device='cuda')",
        "torch.topk(x, 8192)",
        [4 << 20, 8 << 20, 8 << 20, 4 << 20, 8 << 20, (12 << 20) + 255],
    ),
    "topk of few": ("torch.randn(128, 16384, device='cuda')", "torch.topk(x, 64)", [32768, 65536]),
    # The median of all elements: one, sorted elements and positions, and what one row takes.
    "median": (
        "torch.randn(2, 4096, device='cuda')",
        "torch.median(x)",
        [4, 32768, 65536, 65536, 12 * 8192 + 4 * 2048 + 2 * 1024 + 511],
    ),
}


def test_a_sort_takes_what_its_rows_need(tmp_path: Path) -> None:
    """From torch's sources (cuda/SortStable.cu): how rows are sorted depends on how long and how many they are."""
    found = allocated_by_each({name: (f"x = {sort[0]}", sort[1]) for name, sort in _SORTS.items()}, tmp_path)
    assert found == {name: _rounded(expected) for name, (_, _, expected) in _SORTS.items()}


def test_one_head_of_keys_is_not_shared_unless_asked_for(tmp_path: Path) -> None:
    """Falcon: without ``enable_gqa`` the kernels refuse other numbers of heads, and scores are allocated."""
    before = (
        "q = torch.randn(4, 4, 64, 24, device='cuda', requires_grad=True)\n"
        "k = torch.randn(4, 1, 64, 24, device='cuda', requires_grad=True)"
    )
    attend = "torch.nn.functional.scaled_dot_product_attention(q, k, k)"
    assert 4 * 4 * 64 * 64 * 4 in allocated(f"{before}\nSTART\n{attend}", tmp_path)


def test_a_gradient_that_is_a_view_is_not_added_to_in_place(tmp_path: Path) -> None:
    """Weights of an embedding that are also those of the head: the sum of both gradients has memory of its own."""
    script = """
table = torch.randn(256, 96, device="cuda", requires_grad=True)
ids = torch.randint(256, (4, 64), device="cuda")
y = torch.nn.functional.linear(torch.nn.functional.embedding(ids, table), table)
gradient = torch.randn_like(y)
START
y.backward(gradient)
"""
    found = [size for size in allocated(script, tmp_path) if size == 256 * 96 * 4]
    assert len(found) == 4  # of the hidden states, the head, the embedding, and their sum


def test_a_mask_of_ones_hides_nothing_whatever_its_type(tmp_path: Path) -> None:
    """OPT makes its mask of floating-point ones, sees that none is hidden, and leaves it out."""
    script = """
mask = torch.ones(4, 64, device="cuda")
changed = torch.ones(4, 64, device="cuda")
changed[:, 0].zero_()
START
for each in (mask, changed):
    if each.bool().sum() == each.numel():
        torch.empty(4096, device="cuda")
"""
    assert allocated(script, tmp_path).count(4096 * 4) == 1


def test_indices_may_be_empty_or_nested(tmp_path: Path) -> None:
    """As those of experts without tokens, also in backward; a list with a list or an ellipsis is read as a tuple."""
    script = """
x = torch.randn(6, 5, device="cuda", requires_grad=True)
none = torch.empty(0, dtype=torch.int64, device="cuda")
(x[none].sum() + x[none, none].sum() + x[[]].sum() + x[:, []].sum()).backward()
assert x[[[0, 1], [1, 2]]].shape == (2,)
assert x[[..., 0]].shape == (6,)
START
torch.index_put(x.detach(), (none,), x.detach()[:0], accumulate=True)
"""
    assert allocated(script, tmp_path) == [512]


@pytest.mark.parametrize(
    ("before", "operation", "expected"),
    [
        # Wav2Vec2's positions: 1-D convolutions compute on contiguous inputs.
        (
            "x = torch.randn(4, 99, 96, device='cuda').mT\nw = torch.randn(96, 96, 1, device='cuda')",
            "torch.nn.functional.conv1d(x, w)",
            [152064, 152064],
        ),
        # ConvNeXt's: the result of an input with channels last has them last, so that its norm copies nothing.
        (
            (
                "x = torch.randn(4, 16, 16, 24, device='cuda').permute(0, 3, 1, 2)\n"
                "w = torch.randn(24, 1, 7, 7, device='cuda')"
            ),
            "y = torch.nn.functional.conv2d(x, w, padding=3, groups=24)\ny.permute(0, 2, 3, 1).contiguous() + 1",
            [98304, 98304],
        ),
        # Double precision is computed on contiguous inputs: its result is copied for channels last.
        (
            (
                "x = torch.randn(4, 16, 16, 24, device='cuda').permute(0, 3, 1, 2).double()\n"
                "w = torch.randn(24, 1, 7, 7, device='cuda').double()"
            ),
            "y = torch.nn.functional.conv2d(x, w, padding=3, groups=24)\nassert y.is_contiguous()",
            [196608, 196608],
        ),
    ],
    ids=["1-D", "channels last", "double precision"],
)
def test_convolutions_copy_what_has_another_layout(
    before: str, operation: str, expected: list[int], tmp_path: Path
) -> None:
    """Only that."""
    assert allocated(f"{before}\nSTART\n{operation}", tmp_path) == expected
