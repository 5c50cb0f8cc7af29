"""One term of an estimate: how many bytes, by which formula, who says so, and where it does not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

#: What terms are summed by, in the order of a page.
GROUPS = ("weights", "gradients", "optimizer", "activations", "ends", "temporaries")


@dataclass(frozen=True)
class Term:
    """One term of an estimate, of one rank.

    Attributes:
        group: What it is part of (GROUPS): ``activations`` is what the model's layers keep from forward to backward,
            ``ends`` what embedding, head and loss keep, ``temporaries`` what is there for a while only.
        name: What it is, a few words.
        bytes: How much.
        formula: How that follows from the shape, in the letters of `memprof.analysis.estimate.letters`.
        source: Who publishes the formula, or what of torch it follows from.
        not_when: Where it does not hold, a clause; "" where it always does.
        moment: Of temporaries, when they are there: of those with different moments only the largest count at once; ""
            for any moment.
    """

    group: str
    name: str
    bytes: int
    formula: str
    source: str
    not_when: str = ""
    moment: str = ""


def sum_terms(terms: Iterable[Term]) -> int:
    """Sums terms; of temporaries that are there at different moments, the moment that holds the most counts."""
    always, moments = 0, Counter[str]()
    for term in terms:
        if term.moment:
            moments[term.moment] += term.bytes
        else:
            always += term.bytes
    return always + max(moments.values(), default=0)
