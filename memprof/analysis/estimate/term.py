"""One term of an estimate: its bytes, formula, source and limitations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from memprof.json_values import LEFT_OUT

#: Groups of terms, in display order.
GROUPS = ("weights", "gradients", "optimizer", "activations", "ends", "temporaries")


@dataclass(frozen=True)
class Term:
    """One term of an estimate, for one rank.

    Attributes:
        group: Its group (GROUPS): ``activations`` is what the model's layers save for backward, ``ends`` what
            embedding, head and loss save, ``temporaries`` what is live only briefly.
        name: Its name, a few words.
        bytes: Its size.
        formula: How the size follows from the shape, in the symbols of `memprof.analysis.estimate.letters`.
        source: The publication of the formula, or the torch behaviour it follows from.
        not_when: When it does not hold, a clause; "" where it always does.
        moment: When a temporary is live: of temporaries at different moments only the largest sum counts; "" for any
            moment.
    """

    group: str
    name: str
    bytes: int
    formula: str
    source: str
    not_when: str = ""
    moment: str = field(default="", metadata=LEFT_OUT)


def sum_terms(terms: Iterable[Term]) -> int:
    """Sums terms; of temporaries at different moments, only the moment with the most bytes counts."""
    always, moments = 0, Counter[str]()
    for term in terms:
        if term.moment:
            moments[term.moment] += term.bytes
        else:
            always += term.bytes
    return always + max(moments.values(), default=0)
