"""Makes the pictures of the documentation: `make pictures`, or `python -m lab.pictures.make NAME...` for some."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from werkzeug.serving import make_server

from lab.pictures.catalogue import (
    BIG,
    FITS,
    FITTED,
    FOLDER,
    GPT,
    JOBS,
    LSTM,
    PICTURES,
    RANKS,
    REPORT,
    RESNET,
    SESSION,
    THEMES,
    Picture,
)
from lab.pictures.diagrams import write_diagrams
from lab.pictures.session import draw_report, record_session
from memprof_dashboard.app import create_app
from memprof_dashboard.sources import open_sources
from tests.browsing import find_browser, playwright

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "pictures"
#: Counts the answers that a page waits for.
COUNTS = """(() => {
  const ask = window.fetch;
  window.asked = {waiting: 0, quiet: 0};
  const count = (by) => { window.asked.waiting += by; window.asked.quiet = 0; };
  window.fetch = (...all) => { count(1); return ask(...all).finally(() => count(-1)); };
})()"""
#: Where a part of the page is, whatever is scrolled.
_BOX = """selector => {
  const box = document.querySelector(selector).getBoundingClientRect();
  return {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height};
}"""
#: Colours of a picture's palette, and the most of a page's height that is shown of it.
_COLOURS, _MOST_HEIGHT = 256, 800


def record_all(wanted: Collection[str]) -> None:
    """Makes some recordings, those of GPUs dry; what is there already is kept.

    Args:
        wanted: Their names, as in the catalogue.
    """
    suggest = ["suggest", str(BUILD / BIG), "--budget", "20GiB", "--forbid", "precision", "-f"]
    plan = str(BUILD / "plan.toml")
    ranks = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "4", "lab/pictures/ranks_job.py"]
    recorded = {**JOBS, FITS: ("--plan", plan, *FITTED), RANKS: ("--", *ranks)}
    for name in (GPT, RESNET, LSTM):
        shutil.copy(ROOT / "sample_traces" / name.partition(".")[0] / "run.memprof", BUILD / name)
    for name, words in recorded.items():
        if name == FITS and name in wanted:
            _memprof("plan.toml", *suggest, "--write", plan)
        if name in wanted or (name == BIG and FITS in wanted):
            _memprof(name, "record", "-q", "-f", "-o", str(BUILD / name), *words)


def _memprof(made: str, *words: str) -> None:
    """Runs a command of memprof that makes a file, unless it is there; a job that it records may fail.

    Raises:
        RuntimeError: There is no file then.
    """
    if not (BUILD / made).exists():
        subprocess.run([sys.executable, "-m", "memprof", *words], cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
    if not (BUILD / made).exists():
        raise RuntimeError(f"memprof {' '.join(words)} has made no {made}")


@contextmanager
def served(paths: list[Path]) -> Iterator[str]:
    """Serves the dashboard on recordings, and returns its address."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, create_app(open_sources(paths), token="pictures").server, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.port}/?token=pictures"
    finally:
        server.shutdown()
        server.server_close()


def wait_quiet(page: Any, frames: int = 30) -> None:
    """Waits until the page has waited for no answer during some frames from now on."""
    page.evaluate("asked.quiet = 0")
    page.wait_for_function("frames => asked.waiting === 0 && ++asked.quiet > frames", arg=frames)


def shoot(browser: Any, picture: Picture, theme: str, address: str) -> Path:
    """Makes one picture in one theme."""
    size = {"width": picture.width, "height": picture.height}
    context = browser.new_context(viewport=size, color_scheme=theme)
    context.set_default_timeout(120_000)
    context.add_init_script(COUNTS)
    page = context.new_page()
    page.goto(f"{address}&{picture.search}")
    page.wait_for_selector("#timeline .main-svg", state="attached")
    wait_quiet(page)
    for selector in picture.clicks:
        page.locator(selector).first.click()
        wait_quiet(page)
    page.wait_for_selector(picture.waits, state="attached")
    wait_quiet(page)
    page.mouse.move(0, 0)
    path = ROOT / FOLDER / f"{picture.name}-{theme}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    if picture.part:
        box = page.evaluate(_BOX, picture.part)
        page.screenshot(path=str(path), full_page=True, clip={**box, "height": min(box["height"], _MOST_HEIGHT)})
    else:
        page.screenshot(path=str(path))
    context.close()
    with Image.open(path) as image:
        # The colours of a chart are few: a palette is a third of the size, and nothing is seen of it.
        # Refined once by k-means, or the page's background may be of another tint.
        look: Any = {"method": Image.Quantize.MAXCOVERAGE, "kmeans": 1, "dither": Image.Dither.NONE}
        image.convert("RGB").quantize(_COLOURS, **look).save(path, optimize=True)
    return path


def main(names: list[str]) -> int:
    """Makes all pictures, or those of some names."""
    chromium = find_browser()
    if chromium is None:
        print("make pictures needs a Chromium: apt install chromium", file=sys.stderr)
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    os.chdir(BUILD)  # pages show the path of a recording as it was given
    wanted = [picture for picture in PICTURES if not names or picture.name in names]
    if wanted:
        record_all({name for picture in wanted for name in picture.recordings})
    with playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for picture in wanted:
            with served([Path(name) for name in picture.recordings]) as address:
                for theme in THEMES:
                    path = shoot(browser, picture, theme, address)
                    print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")
        browser.close()
    if not names:
        for path in write_diagrams(ROOT):
            print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")
    if not names or SESSION in names:
        path = record_session(ROOT, BUILD / "session", ROOT / FOLDER / f"{SESSION}.svg")
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")
    if not names or REPORT in names:
        path = draw_report(ROOT, BUILD / "session", ROOT / FOLDER / f"{REPORT}.svg")
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
