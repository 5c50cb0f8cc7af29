"""The options of `memprof suggest`, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.cli.options.command_classes import add_all, option
from memprof.cli.options.plan_options import RequestedSize, size_options
from memprof.cli.options.search_options import search_options, step_options
from memprof.cli.options.shared_options import force_option, json_option, no_run_option, write_option
from memprof.emit.registry import TARGETS
from memprof.errors import UsageError
from memprof.trace.files.place import find_place, refuse_existing

if TYPE_CHECKING:
    from memprof.analysis.arrangement.arrangements import ClusterRequest

F = TypeVar("F", bound=Callable[..., Any])


def suggest_options(command: F) -> F:
    """Adds the recording and all options; the command passes them to ``SuggestOptions.read``."""
    return add_all(
        click.argument("trace", type=click.Path(), metavar="TRACE"),
        search_options,
        option(
            "--world-size",
            group="Search",
            type=click.IntRange(min=1),
            default=1,
            metavar="N",
            help="Number of ranks to shard over.",
        ),
        option(
            "--planner",
            group="Search",
            default="auto",
            metavar="NAME",
            help="How modules are chosen: by the search, or by a published planner's schedule.  [default: auto]",
        ),
        option(
            "--compare-planners",
            "compares_planners",
            group="Search",
            is_flag=True,
            help="Compare the published planners instead, at budgets of 90 to 30 % of the peak.",
        ),
        option(
            "--compiled",
            group="Search",
            multiple=True,
            type=click.Path(),
            metavar="TRACE",
            help="A recording of the job under --compile, as a plan to choose from; may be repeated.",
        ),
        option(
            "--check",
            group="Dry runs",
            is_flag=False,
            flag_value=3,
            type=click.IntRange(min=1),
            metavar="[N]",
            help="Dry-run the recorded job under the best plans, until one is confirmed to fit; N dry runs at most.  "
            "[default: 3]",
        ),
        no_run_option,
        option(
            "--compile",
            "compile_runs",
            group="Dry runs",
            is_flag=False,
            flag_value=6,
            type=click.IntRange(min=1),
            metavar="[N]",
            help="Dry-run the recorded job under torch.compile, with decreasing activation budgets until it fits, and "
            "list these plans too; N dry runs at most.  [default: 6]",
        ),
        option(
            "--explain",
            "explained",
            group="Output",
            type=click.IntRange(min=1),
            metavar="N",
            help="Show the N-th plan in detail.",
        ),
        write_option("Write the fastest plan that fits to this TOML file, or the one of --explain."),
        force_option,
        option(
            "--emit",
            "target",
            group="Output",
            type=click.Choice(TARGETS),
            help="Print the fastest plan that fits, or the one of --explain, as memprof emit writes it, and nothing "
            "else.",
        ),
        size_options,
        cluster_options,
        step_options,
        json_option,
    )(command)


@dataclass(frozen=True)
class SuggestOptions:
    """What `memprof suggest` was asked for, by the names of its options.

    Attributes:
        trace: The recording, as it was named.
        size: The size to plan for.
        cluster: The devices to arrange the job over; None to plan for each rank as it was recorded.
        search_flags: The options of ``read_search_request``.
    """

    trace: str
    world_size: int
    planner: str
    compiled: tuple[str, ...]
    check: int | None
    no_run: bool
    compile_runs: int | None
    explained: int | None
    written: Path | None
    target: str | None
    step_number: int | None
    rank: int | None
    is_json: bool
    size: RequestedSize
    cluster: ClusterRequest | None
    search_flags: dict[str, Any]

    @staticmethod
    def read(force: bool, **flags: Any) -> SuggestOptions:
        """Validates the options that the command took.

        Raises:
            UsageError: One is invalid, or excludes another.
        """
        cluster = read_cluster(**{name: flags.pop(name) for name in CLUSTER_FLAGS})
        size = RequestedSize(*(flags.pop(name) for name in ("batch", "length", "lengths", "also")))
        search = ("budget", "machine", "allow", "forbid", "max_slowdown", "time_limit")
        search_flags = {name: flags.pop(name) for name in search}
        found = SuggestOptions(**flags, size=size, cluster=cluster, search_flags=search_flags)
        if found.written is not None:
            refuse_existing(find_place(found.written), force=force)
        found._refuse_conflicts()
        return found

    def _refuse_conflicts(self) -> None:
        at, plans_dry = self.size.option, (self.check, self.compile_runs)
        alone = self.compiled or self.check or self.explained or self.target
        conflicts = {
            "--devices arranges the job over devices by itself: leave out --world-size, --compiled, --check, --explain "
            "and --emit.": self.cluster is not None and (self.world_size > 1 or alone),
            "--also gives recordings of other sizes for --at-batch, --at-length or --lengths: add one.": self.size.also
            and not at,
            f"{at} plans for a size at which no compiled run was recorded: leave out --compiled.": at and self.compiled,
            "--check dry-runs the job as it was recorded under the best plans: leave out --explain and other sizes "
            "such as --at-batch.": self.check is not None and (at or self.explained is not None),
            "--compile dry-runs the job as it was recorded: leave out other sizes such as --at-batch.": at
            and self.compile_runs is not None,
            "--no-run runs nothing, --check and --compile dry-run the job: leave one of them out.": self.no_run
            and plans_dry != (None, None),
            "--emit prints one plan in another form: leave out --json.": self.is_json and self.target is not None,
            "--compiled names runs measured on one machine, whose times do not apply to that of --device: leave one "
            "out.": self.compiled and self.search_flags["machine"],
        }
        for sentence, is_so in conflicts.items():
            if is_so:
                raise UsageError(sentence)


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
