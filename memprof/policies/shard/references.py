"""Finds references to a model's parameters outside the model, and replaces them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch

from memprof.recorder.memory.live_objects import find_referrers

_DICTIONARIES = (dict, OrderedDict, defaultdict)

#: Old and new parameter, by the id of the old one, which stays alive with this dictionary.
Exchange = dict[int, tuple[torch.Tensor, torch.Tensor]]


def exchange_everywhere(exchange: Exchange) -> int:
    """Replaces parameters in every list and dictionary value that holds them.

    Examples are optimizers' groups, a script's lists of parameters to clip, and its variables.

    Args:
        exchange: Old and new parameters.

    Returns:
        Number of remaining references to old ones that cannot be changed, such as in tuples.
    """
    old = [pair[0] for pair in exchange.values()]
    own = {id(old), id(exchange), *(id(pair) for pair in exchange.values())}
    left = 0
    for holder in find_referrers(old):
        if id(holder) in own:
            continue
        if type(holder) is list:
            holder[:] = [_exchanged(exchange, each) for each in holder]
        elif type(holder) in _DICTIONARIES:
            for key, value in list(holder.items()):
                new = _exchanged(exchange, value)
                if new is not value:
                    holder[key] = new
        elif type(holder) is tuple:
            left += 1
    return left


def _exchanged(exchange: Exchange, value: Any) -> Any:
    pair = exchange.get(id(value))
    return pair[1] if pair is not None and pair[0] is value else value
