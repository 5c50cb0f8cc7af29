"""The lengths of a data set: its worst batch, and the reserved bytes of a mix of its lengths."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memprof.errors import BadInputError
from memprof.planners.scaling.sized import SizedStep
from memprof.replay.allocator.events import replay
from memprof.replay.allocator.rules import Settings
from memprof.replay.allocator.steps import requests_of_steps
from memprof.trace.files.reading import read_text
from memprof.units import format_bytes

#: Limits on the batches of a mix, and on all their operators together: replaying these takes seconds.
_MOST_BATCHES = 48
_MOST_OPS = 150_000

#: Random seed of a mix's order.
_SEED = 0

_MOST_LENGTH = 2**31

#: Growth of reserved bytes below this share over a mix counts as none.
_SLIGHT = 0.01


@dataclass(frozen=True)
class LengthMix:
    """Results for the lengths of a data set.

    Attributes:
        batches: Batches in the file.
        longest: Length of the longest batch.
        recorded_longest: The longest recorded length.
        above: Number of batches longer than that.
        mixed: Number of batches whose steps were replayed one after the other.
        lengths_in_mix: Number of distinct lengths among them.
        reserved_alone_bytes: Peak reserved bytes where every batch has the longest length.
        reserved_half_bytes: Peak reserved bytes over the first half of the mix.
        reserved_mix_bytes: Peak reserved bytes over the whole mix.
        reserved_expandable_bytes: The same with expandable segments; None where these are in force.
    """

    batches: int
    longest: int
    recorded_longest: int
    above: int
    mixed: int
    lengths_in_mix: int
    reserved_alone_bytes: int
    reserved_half_bytes: int
    reserved_mix_bytes: int
    reserved_expandable_bytes: int | None

    @property
    def growth_bytes(self) -> int:
        """Reserved bytes of a mix minus those of batches of the longest length alone; may be negative."""
        return self.reserved_mix_bytes - self.reserved_alone_bytes

    @property
    def grows(self) -> bool:
        """Whether a mix reserves more than batches of the longest length alone."""
        return self.growth_bytes > _SLIGHT * self.reserved_alone_bytes

    def describe(self) -> tuple[str, ...]:
        """Describes in two sentences the batch lengths, and the reserved bytes of a mix of them."""
        share = f"{self.above:,} of {self.batches:,} batches {'is' if self.above == 1 else 'are'} longer"
        mix = (
            f"a mix of {self.mixed:,} batches of {self.lengths_in_mix:,} lengths reserves "
            f"{format_bytes(self.reserved_mix_bytes)} without a plan (caching allocator modelled)"
        )
        alone = f"{format_bytes(self.reserved_alone_bytes)} for the longest alone"
        if not self.grows:
            return f"{share} than recorded ({self.recorded_longest})", f"{mix}: no more than {alone}"
        less = (
            ""
            if self.reserved_expandable_bytes is None
            else (f"; {format_bytes(self.reserved_expandable_bytes)} with expandable_segments:True")
        )
        return (
            f"{share} than recorded ({self.recorded_longest})",
            f"{mix}: {format_bytes(self.growth_bytes)} more than the {alone}{less}",
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the result ready for ``json.dump``."""
        return {**dataclasses.asdict(self), "grows": self.grows}


def read_lengths(path: Path) -> tuple[int, ...]:
    """Reads the lengths of a data set: one line per batch, with its length or the lengths of its samples.

    Lengths in a line are separated by spaces or commas; the longest counts. Empty lines and ``#`` comments are
    skipped.

    Returns:
        The length of each batch, in order.

    Raises:
        BadInputError: The file does not exist or cannot be read, or a line is not a length.
    """
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise BadInputError(f"no file {path}: --lengths reads one with a length per line.") from None
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise BadInputError(f"{path} is not text: --lengths reads one length per line.") from None
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = re.split(r"[\s,]+", line.split("#", 1)[0].strip())
        if words != [""]:
            found.append(max(_length(word, path, number) for word in words if word))
    if not found:
        raise BadInputError(f"{path} contains no lengths: write one per line, such as 512.")
    return tuple(found)


def _length(word: str, path: Path, line: int) -> int:
    if not re.fullmatch(r"[0-9]+", word) or not 0 < int(word[:20]) < _MOST_LENGTH:
        shown = word if len(word) <= 40 else f"{word[:37]}..."
        raise BadInputError(
            f"{path}, line {line}: {shown!r} is not a length: write whole numbers above 0, such as 512."
        )
    return int(word)


def mix_of(lengths: Sequence[int], sized: SizedStep, settings: Settings) -> LengthMix:
    """Replays a mix of a data set's batches through the caching allocator model.

    The mix samples all batches evenly over their lengths, including the longest, and is shuffled with a fixed seed. The
    longest comes last, so that fragmentation left by shorter ones counts.
    """
    longest, recorded = max(lengths), max(sized.sizes)
    step = sized.step_at(longest)
    count = min(len(lengths), _MOST_BATCHES, max(4, _MOST_OPS // max(len(step.ops), 1)))
    drawn = np.sort(np.array(lengths))[np.linspace(0, len(lengths) - 1, count).round().astype(int)]
    mix = drawn.tolist()[:-1]
    random.Random(_SEED).shuffle(mix)
    mix.append(longest)
    steps: Mapping[int, Any] = {length: sized.step_at(length) for length in set(mix)}
    issued = requests_of_steps([steps[length] for length in mix])
    reserved = replay(issued.requests, settings).reserved()
    alone = replay(requests_of_steps([step, step]).requests, settings).reserved()
    grown = None
    if not settings.expandable_segments:
        growing = dataclasses.replace(settings, expandable_segments=True)
        grown = int(replay(issued.requests, growing).reserved().max(initial=0))
    return LengthMix(
        batches=len(lengths),
        longest=longest,
        recorded_longest=recorded,
        above=sum(length > recorded for length in lengths),
        mixed=len(mix),
        lengths_in_mix=len(steps),
        reserved_alone_bytes=int(alone.max(initial=0)),
        reserved_half_bytes=int(reserved[: len(reserved) // 2].max(initial=0)),
        reserved_mix_bytes=int(reserved.max(initial=0)),
        reserved_expandable_bytes=grown,
    )
