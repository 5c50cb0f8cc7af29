"""The largest share of a budget whose peak fits, found in a few dry runs."""

from __future__ import annotations

from collections.abc import Generator

#: The search ends when the largest share that fits is known to this accuracy.
_ACCURACY = 0.1
#: The share of the budget that the next peak is to have, and the one from which on a plan that fits is kept.
_AIM, _CLOSE = 0.97, 0.95
#: Nearest that the next share comes to one that was tried, of the range between those that fit and do not.
_MARGIN = 0.2


def search_shares(budget_bytes: int, kept_bytes: int) -> Generator[float, int, None]:
    """Yields shares from 0 to 1, the largest first; the caller sends the peak of each, in bytes.

    The next share is where the line through the nearest peaks meets the budget; before there are two, the peak is
    assumed to fall evenly by ``kept_bytes``. The peak need not fall evenly, nor at all: where the same end of the range
    has moved twice, the range is halved, and a share with a higher peak than a larger one is its lower end. If nothing
    above such a share fits, those below it are tried, and 0 last.

    Args:
        budget_bytes: The budget.
        kept_bytes: What a share of 1 keeps, approximately.
    """
    over = yield 1.0
    if over <= budget_bytes:
        return
    above, below, under = 1.0, 0.0, 0
    slope, moved, is_again, rises = float(kept_bytes), "", False, False
    lowest, peak_of_lowest = 1.0, over
    while above - below > _ACCURACY and under < _CLOSE * budget_bytes:
        gap, aim = above - below, _AIM * budget_bytes
        if is_again or (not under and (rises or slope <= 0)):
            guess = (above + below) / 2
        elif under:
            guess = below + gap * (aim - under) / (over - under)
        else:
            guess = above - (over - aim) / slope
        share = round(min(max(guess, below + _MARGIN * gap), above - _MARGIN * gap), 2)
        peak = yield share
        if share < lowest:
            lowest, peak_of_lowest = share, peak
        if peak <= budget_bytes:
            end, below, under = "below", share, peak
        elif peak > over and not under:
            end, below, rises = "below", share, True
        else:
            slope = (over - peak) / (above - share)
            end, above, over = "above", share, peak
        moved, is_again = end, end == moved
        if rises and not under and above - below <= _ACCURACY:
            above, below, over = lowest, 0.0, peak_of_lowest
            slope, moved, is_again, rises = 0.0, "", False, False
    if not under:
        yield 0.0
