"""The options of `memprof suggest`, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.cli.options.cluster_options import CLUSTER_FLAGS, cluster_options, read_cluster
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
