"""The badges of the README as SVG: facts of this version, read from the project's own settings."""

from __future__ import annotations

import html
import tomllib
from functools import partial
from pathlib import Path

from memprof.launch.torch_versions import NEWEST, OLDEST
from memprof_dashboard.palette import THEMES

_ROOT = Path(__file__).parents[2]
_HEIGHT, _GLYPH, _SPACE = 20, 6.6, 8


def _project() -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def _pythons() -> str:
    """Returns the versions of Python that the package is declared for."""
    classifiers = _project()["classifiers"]
    assert isinstance(classifiers, list)
    ends = [str(one).rpartition(" :: ")[2] for one in classifiers if "Python :: 3." in str(one)]
    return " | ".join(ends)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _svg(label: str, fact: str) -> str:
    left, right = (2 * _SPACE + _GLYPH * len(text) for text in (label, fact))
    texts = "".join(
        f'<text x="{x:g}" y="14" textLength="{_GLYPH * len(text):g}" fill="{ink}">{html.escape(text)}</text>'
        for x, text, ink in ((_SPACE, label, "#ffffff"), (left + _SPACE, fact, "#ffffff"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right:g}" height="{_HEIGHT}" role="img">'
        f"<title>{html.escape(f'{label}: {fact}')}</title>"
        f'<clipPath id="round"><rect width="{left + right:g}" height="{_HEIGHT}" rx="4"/></clipPath>'
        f'<g clip-path="url(#round)"><rect width="{left:g}" height="{_HEIGHT}" fill="#3c4650"/>'
        f'<rect x="{left:g}" width="{right:g}" height="{_HEIGHT}" fill="{THEMES["light"].accent}"/></g>'
        f'<g font-family="ui-monospace,Menlo,Consolas,monospace" font-size="11">{texts}</g></svg>\n'
    )


#: What each badge says: a name, and the fact.
FACTS = {
    "badge-python": ("Python", _pythons()),
    "badge-torch": ("PyTorch", f"{_minor(OLDEST)} - {_minor(NEWEST)}"),
    "badge-license": ("license", str(_project()["license"]).partition(" AND ")[0]),
}
#: The drawing of each.
BADGES = {name: partial(_svg, label, fact) for name, (label, fact) in FACTS.items()}
