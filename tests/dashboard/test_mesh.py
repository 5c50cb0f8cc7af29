"""The ranks as a device mesh: what is typed, what is drawn, and what differs along its dimensions."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly")

from plotly.utils import PlotlyJSONEncoder

from memprof.analysis.ranks.rank_report import RankPeak
from memprof.errors import UsageError
from memprof.trace.manifest import Between
from memprof_dashboard.figures.ranks import mesh_figure
from memprof_dashboard.palette import THEMES
from memprof_dashboard.views.mesh import (
    Mesh,
    default_mesh,
    describe_differences,
    describe_worst,
    peaks_on,
    read_mesh,
    with_same_ranks,
)

MIB = 2**20
MESH = Mesh(("pp", "dp", "tp"), (2, 2, 4))


def rank(number: int, peak: int | None, node: str = "", module: str = "") -> RankPeak:
    return RankPeak(number, node, "cuda:0", 1, peak, None, 5, "backward", "aten.mm", module, 1.0, "")


def job(count: int = 16, per_node: int = 8) -> tuple[RankPeak, ...]:
    """Ranks of the first stage hold 8 MiB more, and each tensor-parallel rank 1 MiB more than the one before."""
    return tuple(
        rank(number, (100 + 8 * (number < count // 2) + number % 4) * MIB, f"n{number // per_node}")
        for number in range(count)
    )


def test_a_mesh_is_read_as_init_device_mesh_numbers_it() -> None:
    mesh = read_mesh(" pp=2,dp = 2, tp=4 ", 16)
    assert mesh == MESH
    assert str(mesh) == "pp=2, dp=2, tp=4"
    assert (mesh.rows, mesh.columns) == (4, 4)
    assert [mesh.row_name(row) for row in range(4)] == ["pp 0, dp 0", "pp 0, dp 1", "pp 1, dp 0", "pp 1, dp 1"]
    assert read_mesh("tp=16", 16).row_name(0) == ""


@pytest.mark.parametrize("text", ["tp", "=4", "tp=0", "tp=-2", "tp=4,", "tp=x", "tp=99999999999999999999", "tp=1e3"])
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="invalid dimension"):
        read_mesh(text, 16)


def test_a_mesh_of_other_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="a mesh of 2 x 4 has 8 ranks, not 16"):
        read_mesh("dp=2, tp=4", 16)


def test_nodes_are_rows_where_they_are_known() -> None:
    assert default_mesh(job(), 16) == Mesh(("node", "local rank"), (2, 8))
    assert default_mesh(job(per_node=16), 16) == Mesh(("rank",), (16,))
    assert default_mesh(job(per_node=5), 16).names == ("rank",)
    assert default_mesh((rank(0, MIB),), 1022) == Mesh(("row", "column"), (73, 14))


def test_a_mesh_of_one_row_names_a_rank_once() -> None:
    mesh = default_mesh(job(per_node=16), 16)
    assert describe_worst(mesh, peaks_on(mesh, job(per_node=16))).startswith("Rank 3 is highest: 111.00 MiB")


def test_it_says_what_differs_along_each_dimension() -> None:
    peaks = peaks_on(MESH, job())
    assert describe_worst(MESH, peaks).startswith("Rank 3 (pp 0, dp 0, tp 3) is highest: 111.00 MiB")
    assert describe_differences(MESH, peaks) == (
        "Mean peaks differ by 8.00 MiB along pp (pp 0 highest, pp 1 lowest); by 3.00 MiB along tp (tp 3 highest, tp 0 "
        "lowest); by nothing along dp."
    )
    same = tuple(rank(number, MIB) for number in range(16))
    assert describe_differences(MESH, peaks_on(MESH, same)) == "Peaks are the same along every dimension."
    assert describe_differences(MESH, peaks_on(MESH, same[:1])) == ""
    assert describe_worst(MESH, peaks_on(MESH, ())) == ""


def test_the_figure_has_a_cell_for_each_rank() -> None:
    ranks = (*job()[:15], rank(15, None))
    figure = mesh_figure(MESH, ranks, peaks_on(MESH, ranks), 3, THEMES["light"])
    drawn = figure.data[0]
    assert np.array(drawn.z).shape == (4, 4)
    assert drawn.z[0][3] == pytest.approx(111)
    assert np.isnan(drawn.z[3][3])
    assert drawn.customdata.tolist() == np.arange(16).reshape(4, 4).tolist()
    assert drawn.hovertext[3][3] == "rank 15: not recorded"
    assert "rank 3: 111.00 MiB" in drawn.hovertext[0][3]
    texts = figure.data[1]
    assert (texts.text[3], texts.text[15]) == ("3<br>111.00 MiB", "15")
    assert texts.textfont.color[3] == "#10151b"  # on the brightest cell
    assert texts.textfont.color[int(np.nanargmin(drawn.z))] == "#ffffff"
    (shape,) = figure.layout.shapes
    assert (shape.x0, shape.x1, shape.y0, shape.y1) == (2.5, 3.5, -0.5, 0.5)


def test_names_of_modules_are_text() -> None:
    mesh, ranks = Mesh(("dp",), (2,)), (rank(0, MIB, module="<b>x</b>"), rank(1, MIB))
    figure = mesh_figure(mesh, ranks, peaks_on(mesh, ranks), 0, THEMES["dark"])
    assert "<b>" not in figure.data[0].hovertext[0][0]


def test_a_thousand_ranks_are_small_to_send() -> None:
    mesh = Mesh(("dp", "tp"), (128, 8))
    figure = mesh_figure(mesh, job(1024), peaks_on(mesh, job(1024)), 0, THEMES["light"])
    assert figure.data[0].text is None
    assert len(json.dumps(figure, cls=PlotlyJSONEncoder)) < 300_000


def test_ranks_that_do_the_same_as_one_that_was_dry_run_are_drawn_like_it() -> None:
    same = {0: (1, 2), 3: ()}
    trace: Any = SimpleNamespace(manifest_of=lambda number: SimpleNamespace(same_ranks=same[number], between=Between()))
    ranks = with_same_ranks(trace, (rank(0, 5 * MIB), rank(3, MIB)))
    assert peaks_on(Mesh(("dp",), (4,)), ranks).tolist() == [5 * MIB, 5 * MIB, 5 * MIB, MIB]


def test_stages_between_two_that_were_dry_run_are_drawn_between_them() -> None:
    """Stage 1 stores a quarter fewer of the micro-batches in which stages 0 and 3 differ, stage 2 the half."""
    held = {0: Between((1, 2), 3, (0.25, 0.5)), 3: Between()}
    trace: Any = SimpleNamespace(manifest_of=lambda number: SimpleNamespace(same_ranks=(), between=held[number]))
    ranks = with_same_ranks(trace, (rank(0, 5 * MIB), rank(3, MIB)))
    assert peaks_on(Mesh(("pp",), (4,)), ranks).tolist() == [5 * MIB, 4 * MIB, 3 * MIB, MIB]
