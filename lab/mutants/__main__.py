"""Mutation testing of a sample: ``python -m lab.mutants --sample 200`` (docs/testing.md)."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lab.mutants.lines import ROOT, LineMap, digest_of
from lab.mutants.mutations import Mutant, diff_of, lines_that_read, mutated_text, sample
from lab.mutants.trial import Copy, Verdict, warm_up

OUT = ROOT / "build" / "mutants"
_DETECTED = ("killed", "timed out")


def main() -> None:
    """Samples mutants, tries them, and writes the survivors."""
    options = _parse()
    lines = LineMap(OUT / "lines.json")
    if not options.keep_map:
        lines.update()
    mutants = sample(options.sample, options.seed, OUT / "candidates.json")
    mutants = [one for one in mutants if one.source.startswith(tuple(options.only or [""]))]
    results = Results(OUT / "results.json")
    todo = [one for one in mutants if not results.holds(one, again=options.again)]
    print(f"{len(mutants)} mutants sampled, {len(todo)} to try.", flush=True)
    warm_up()
    _try(todo, lines, results, jobs=options.jobs, most_seconds=options.seconds)
    tried = [(one, results.verdicts[one.id]) for one in mutants if one.id in results.verdicts]
    (OUT / "survivors.md").write_text(_survivors(tried))
    print(score_line([verdict for _, verdict in tried]))
    print(f"Survivors: {(OUT / 'survivors.md').relative_to(ROOT)}")


class Results:
    """The verdicts so far, written after each: a run that is stopped goes on from there."""

    def __init__(self, path: Path) -> None:
        """Reads what there is."""
        self._path = path
        read = json.loads(path.read_text()) if path.exists() else {}
        self._digests: dict[str, str] = {key: one["digest"] for key, one in read.items()}
        self.verdicts = {key: Verdict(**one["verdict"]) for key, one in read.items()}

    def holds(self, mutant: Mutant, *, again: bool) -> bool:
        """Returns whether a mutant need not be tried: its file is as it was and, ``again``, it was detected."""
        if self._digests.get(mutant.id) != digest_of(ROOT / mutant.source):
            self.verdicts.pop(mutant.id, None)
            return False
        return not again or self.verdicts[mutant.id].outcome in _DETECTED

    def add(self, mutant: Mutant, verdict: Verdict) -> None:
        """Notes a verdict."""
        self.verdicts[mutant.id] = verdict
        self._digests[mutant.id] = digest_of(ROOT / mutant.source)
        both = {key: {"digest": self._digests[key], "verdict": asdict(one)} for key, one in self.verdicts.items()}
        self._path.write_text(json.dumps(both, indent=1))


def score_line(verdicts: list[Verdict]) -> str:
    """Returns the score in words: of all mutants, and of those whose line some test runs."""
    count = Counter(verdict.outcome for verdict in verdicts)
    detected = sum(count[outcome] for outcome in _DETECTED)
    reached = len(verdicts) - count["not run"]
    return (
        f"{detected} of {len(verdicts)} mutants detected ({detected / max(1, len(verdicts)):.0%}): "
        f"{count['killed']} killed, {count['timed out']} timed out, {count['survived']} survived, "
        f"{count['not run']} on lines that these tests do not run "
        f"({detected / max(1, reached):.0%} of the {reached} others)."
    )


def selected(mutant: Mutant, lines: LineMap, most_seconds: float) -> list[str]:
    """Returns the tests to run for a mutant: those that run its lines first, whole files together.

    Of a change outside functions these are the tests that run the lines that read what it assigns, or any of the file.
    Files of the same part of the tests come first, then the quicker ones, up to ``most_seconds`` as measured, and at
    least one test.
    """
    part = "tests/" + mutant.source.split("/")[1]
    changed: Sequence[int] = range(mutant.line, mutant.last_line + 1)
    if mutant.at_import:  # the test that happened to import the module first says nothing of it
        changed = lines_that_read(mutant, (ROOT / mutant.source).read_text()) or range(1, 10_000)
    covering, others = lines.tests_of(mutant.source, changed)
    if not covering and mutant.at_import:
        covering, others = lines.tests_of(mutant.source, range(1, 10_000))
    chosen: list[str] = []
    spent = 0.0
    for tests in (covering, others):
        seconds = Counter({test.partition("::")[0]: 0.0 for test in tests})
        for test in tests:
            seconds[test.partition("::")[0]] += lines.seconds_of(test)
        order = {file: (not file.startswith(part), seconds[file]) for file in seconds}
        for test in sorted(tests, key=lambda test: (order[test.partition("::")[0]], lines.seconds_of(test))):
            if not chosen or spent + lines.seconds_of(test) <= most_seconds:
                chosen.append(test)
                spent += lines.seconds_of(test)
    return chosen


def _try(todo: list[Mutant], lines: LineMap, results: Results, *, jobs: int, most_seconds: float) -> None:
    waiting = list(reversed(todo))
    copies = [Copy(OUT / f"copy-{number}") for number in range(min(jobs, len(todo)))]
    running: dict[int, Mutant] = {}
    done = 0
    while waiting or running:
        for number, copy in enumerate(copies):
            if number in running:
                verdict = copy.verdict()
                if verdict is not None:
                    done += 1
                    _note(running.pop(number), verdict, results, f"{done}/{len(todo)}")
            while number not in running and waiting:
                mutant = waiting.pop()
                tests = selected(mutant, lines, most_seconds)
                if not tests:
                    done += 1
                    _note(mutant, Verdict("not run"), results, f"{done}/{len(todo)}")
                    continue
                text = mutated_text(mutant, (ROOT / mutant.source).read_text())
                limit = 90 + 10 * sum(lines.seconds_of(test) for test in tests)
                copy.start(mutant.source, text, tests, limit_s=limit)
                running[number] = mutant
        time.sleep(0.1)


def _note(mutant: Mutant, verdict: Verdict, results: Results, place: str) -> None:
    results.add(mutant, verdict)
    print(f"{place} {verdict.outcome}: {mutant.source}:{mutant.line} ({verdict.took_s:.0f} s)", flush=True)


def _survivors(tried: list[tuple[Mutant, Verdict]]) -> str:
    parts = ["# Mutants that no test has detected\n", score_line([verdict for _, verdict in tried]) + "\n"]
    for mutant, verdict in sorted(tried, key=lambda one: (one[1].outcome, one[0].source, one[0].line)):
        if verdict.outcome not in _DETECTED:
            diff = diff_of(mutant, (ROOT / mutant.source).read_text())
            parts.append(
                f"## {mutant.source}:{mutant.line}\n\n{verdict.outcome} ({verdict.tests} tests, {mutant.operator}, "
                f"{mutant.id})\n\n```diff\n{diff}\n```\n"
            )
    return "\n".join(parts)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=200, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="most time of the tests of one mutant, as measured")
    parser.add_argument("--again", action="store_true", help="try those that survived once more")
    parser.add_argument("--only", action="append", help="mutants of the sample in this folder or file alone")
    parser.add_argument("--keep-map", action="store_true", help="do not measure again which tests run which lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
