"""The options that arrange a job over many devices, for `memprof suggest --devices`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.cli.options.command_classes import add_all, option
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.analysis.arrangement.arrangements import ClusterRequest

F = TypeVar("F", bound=Callable[..., Any])

_GROUP = "Many devices"

#: What --layout fixes, by the word for it.
_FIELDS = {
    "dp": "data",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "zero": "zero",
    "micro-batches": "micro_batches",
}

#: The parameters of these options.
CLUSTER_FLAGS = ("devices", "devices_per_node", "node_link", "global_batch", "layout")


def cluster_options(command: F) -> F:
    """Adds ``--devices`` and what describes them; the command passes these options to ``read_cluster``."""
    return add_all(
        option(
            "--devices",
            group=_GROUP,
            type=click.IntRange(min=2, max=4096),
            metavar="N",
            help="Find the fastest data, tensor, pipeline, context and expert parallelism over N devices.",
        ),
        option(
            "--devices-per-node",
            group=_GROUP,
            type=click.IntRange(min=1),
            metavar="N",
            help="Devices that share a node.  [default: 8]",
        ),
        option(
            "--node-link",
            group=_GROUP,
            type=click.FloatRange(min=0, min_open=True),
            metavar="GB/S",
            help="What a device sends to other nodes, in 10^9 bytes per second.  [default: 50]",
        ),
        option(
            "--global-batch",
            group=_GROUP,
            type=click.IntRange(min=1),
            metavar="SAMPLES",
            help="Samples of an update over all devices.  [default: the recorded batch on each]",
        ),
        option("--layout", group=_GROUP, metavar="TEXT", help="Fix a part of the arrangement: tp=8,pp=4,zero=3."),
    )(command)


def read_cluster(
    devices: int | None,
    devices_per_node: int | None,
    node_link: float | None,
    global_batch: int | None,
    layout: str | None,
) -> ClusterRequest | None:
    """Validates the options.

    Returns:
        The request; None without ``--devices``.

    Raises:
        UsageError: An option is invalid, or given without ``--devices``.
    """
    others = {
        "--devices-per-node": devices_per_node,
        "--node-link": node_link,
        "--global-batch": global_batch,
        "--layout": layout,
    }
    if devices is None:
        given = next((name for name, value in others.items() if value is not None), None)
        if given is not None:
            raise UsageError(f"{given} describes an arrangement over several devices: add --devices N.")
        return None
    from memprof.analysis.arrangement.arrangements import ClusterRequest

    more = {"per_node": devices_per_node, "node_gigabytes_per_second": node_link, "global_samples": global_batch}
    known = {name: value for name, value in more.items() if value is not None}
    return ClusterRequest(devices, fixed=_read_layout(layout), **known)  # type: ignore[arg-type]  # by their names


def _read_layout(text: str | None) -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = {}
    for part in text.split(",") if text is not None else ():
        word, _, number = part.strip().partition("=")
        if word not in _FIELDS or not number.isdecimal():
            raise UsageError(
                f"invalid part {part.strip()!r} of --layout: write {', '.join(_FIELDS)} with a number, such as "
                "tp=8,pp=4,zero=3."
            )
        found[_FIELDS[word]] = int(number)
    return tuple(found.items())
