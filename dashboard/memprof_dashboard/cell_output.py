"""A recording's timeline as the output of a notebook's cell: interactive, and a still picture where nothing runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from memprof.errors import MemprofError
from memprof.replay.history import History
from memprof.trace.store import Trace
from memprof_dashboard.figures.still import still_timeline
from memprof_dashboard.palette import THEMES

#: Height of the interactive figure, in pixels.
_HEIGHT = 420


def cell_output(path: Path) -> dict[str, Any]:
    """Returns a timeline in the forms that front ends choose from, by MIME type.

    JupyterLab, Notebook and VS Code draw plotly's form; where no JavaScript runs (GitHub, an exported page), the SVG is
    shown, which is also all there is without plotly.

    Raises:
        BadInputError: It is missing or damaged, or contains no operators.
    """
    history = History(Trace.open(path))
    title = f"{path.name}: live bytes by category, operator by operator"
    forms: dict[str, Any] = {"text/plain": title, "image/svg+xml": still_timeline(history, title).to_svg()}
    if importlib.util.find_spec("plotly") is not None:
        from memprof_dashboard.figures.timeline import timeline

        figure = timeline(history, 0, len(history.total), THEMES["light"])
        figure.update_layout(height=_HEIGHT, paper_bgcolor="#ffffff", margin={"t": 60})
        forms["application/vnd.plotly.v1+json"] = json.loads(figure.to_json())
    return forms


def main(arguments: list[str]) -> int:
    """Prints the forms of one recording as JSON; returns the exit code."""
    try:
        print(json.dumps(cell_output(Path(arguments[0]))))
    except MemprofError as error:
        print(f"memprof: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
