"""A stand-in for requests: whatever is asked for, a random citation graph in Cora's format comes back."""

from __future__ import annotations

import io
import random
import tarfile
from types import TracebackType
from typing import Any

PAPERS, WORDS, CITATIONS = 2000, 64, 5000


class Answer:
    """An archive of the two files ``cora/cora.content`` and ``cora/cora.cites``."""

    def __init__(self) -> None:
        draw, self.raw = random.Random(0), io.BytesIO()
        content = "\n".join(_paper(draw, number) for number in range(PAPERS))
        cites = "\n".join(f"{draw.randrange(PAPERS)}\t{draw.randrange(PAPERS)}" for _ in range(CITATIONS))
        with tarfile.open(fileobj=self.raw, mode="w:gz") as archive:
            for name, text in (("content", content), ("cites", cites)):
                entry = tarfile.TarInfo(f"cora/cora.{name}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
        self.raw.seek(0)

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.raw.close()


def _paper(draw: random.Random, number: int) -> str:
    words = "\t".join(str(int(draw.random() < 0.1)) for _ in range(WORDS))
    return f"{number}\t{words}\tclass{draw.randrange(7)}"


def get(url: str, **options: Any) -> Answer:
    """Returns the archive."""
    return Answer()
