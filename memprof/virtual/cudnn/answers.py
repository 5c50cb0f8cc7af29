"""Workspaces that cuDNN states for a card's convolutions: each asked once, then kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from memprof.machines.card import Card
from memprof.machines.outside import MOST_PARTIAL_BYTES
from memprof.trace.files.private_file import make_private_folder, user_folder
from memprof.units import format_count
from memprof.virtual.cudnn.library import (
    FIRST_VERSION,
    Call,
    CudnnError,
    Library,
    Rules,
    find_library,
    version_beside,
)
from memprof.virtual.cudnn.partial_sums import bytes_on_card

#: The cuDNN that a CUDA build of torch requires (requirements of its wheels on the package index).
_OF_TORCH = {(2, 11): 91900, (2, 12): 92000, (2, 13): 92000, (2, 14): 92400, (2, 15): 92600}
#: Engines that torch does not use for volumes: operation, engine, first and last version (plan_errata_exception,
#: Conv_v8.cpp of torch 2.11).
_NOT_FOR_VOLUMES = (("forward", 23, 90_800, 91_500), ("data", 23, 8_000, 10**9))


@dataclass(frozen=True)
class Answer:
    """What one call needs.

    Attributes:
        workspace_bytes: Of the engine that torch takes.
        most_bytes: Of any engine, where they are timed: what is allocated at first.
        is_certain: Whether the first was checked (`partial_sums`).
    """

    workspace_bytes: int
    most_bytes: int
    is_certain: bool


class Answers:
    """cuDNN's answers for one card.

    Attributes:
        version: Of the library, such as 91900; 0 where nothing can be asked.
        expected: The version that CUDA builds of the job's torch come with; 0 if unknown.
        uncertain: Kinds of calls whose partial sums could not be checked.
        problem: Why the library could not be loaded; "" if it could, or was not needed.
    """

    def __init__(self, card: Card, version: int, expected: int, folder: Path, path: Path | None) -> None:
        """Loads nothing: that is done with the first call that was never asked.

        Args:
            card: The card.
            version: Of the library.
            expected: The version that CUDA builds of the job's torch come with.
            folder: Where answers are kept.
            path: The library; None to use what is kept alone.
        """
        self.version, self.expected = version, expected
        self.uncertain: set[str] = set()
        self.problem = ""
        self._card, self._path = card, path
        self._folder = folder

    @classmethod
    def find(cls, card: Card, torch_version: str) -> Answers:
        """Returns what asks the cuDNN that is installed beside memprof, and keeps answers in the user's cache folder.

        Args:
            card: The card.
            torch_version: Of the torch that runs the job, such as ``2.13.0+cpu``.
        """
        major, minor = (int(part) for part in torch_version.partition("+")[0].split(".")[:2])
        path = None if os.environ.get("MEMPROF_CUDNN", "") == "0" else find_library()
        version = 0 if path is None else version_beside(path)
        folder = user_folder("XDG_CACHE_HOME", ".cache") / "memprof" / "cudnn"
        is_new = version >= FIRST_VERSION
        found = cls(card, version if is_new else 0, _OF_TORCH.get((major, minor), 0), folder, path)
        if version and not is_new:
            found.problem = f"version {_words(version)} cannot be asked without a GPU, 9.8 and newer can"
        return found

    def ask(self, call: Call, rules: Rules) -> Answer | None:
        """Returns what a call needs; None where cuDNN cannot be asked, or has no engine for it.

        Args:
            call: The convolution.
            rules: What torch filters engines by.
        """
        if not self.version:
            return None
        key = f"{call.key()} {int(rules.is_deterministic)}{int(rules.allows_tf32)}{int(rules.is_timed)}"
        if key not in self._known:
            if self._library is None:
                return None
            self._known[key] = found = self._find(self._library, call, rules)
            size, most, certain = (
                (-1, -1, 0) if found is None else (found.workspace_bytes, found.most_bytes, found.is_certain)
            )
            line = f"{key}\t{size}\t{most}\t{int(certain)}\n".encode()
            with contextlib.suppress(OSError):  # a home that cannot be written: asked anew by the next dry run
                make_private_folder(self._folder)
                file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                try:
                    os.write(file, line)  # one call: dry runs beside each other append whole lines
                finally:
                    os.close(file)
        answer = self._known[key]
        if answer is not None and not answer.is_certain:
            self.uncertain.add(key)
        return answer

    @property
    def name(self) -> str:
        """The version that is asked, such as ``9.19.0``; "" where nothing can be asked."""
        return _words(self.version) if self.version and not self.problem else ""

    def note(self) -> str:
        """Returns a note on whose answers they are."""
        asked = f"workspaces of convolutions are those that cuDNN {self.name} states for the device"
        if self.expected and self.version // 100 != self.expected // 100:
            asked += f"; CUDA builds of this torch come with {_words(self.expected)}, which may choose others"
        if self.uncertain:
            kinds, most = format_count(len(self.uncertain), "kind"), MOST_PARTIAL_BYTES >> 20
            asked += f"; {kinds} of them may need up to {most} MiB more"
        return asked

    def _find(self, library: Library, call: Call, rules: Rules) -> Answer | None:
        first: tuple[int, bool] | None = None
        most = 0
        try:
            for candidate in chain(library.candidates(call, rules), library.candidates(call, rules, "fallback")):
                if len(call.x.sizes) > 4 and any(
                    (call.kind, candidate.engine) == (kind, engine) and since <= library.version <= until
                    for kind, engine, since, until in _NOT_FOR_VOLUMES
                ):
                    continue
                if first is None:
                    first = bytes_on_card(library, call, candidate, self._card.machine.multiprocessors)
                most = max(most, candidate.workspace_bytes)
                if not rules.is_timed:
                    break
        except CudnnError:  # it does not take such a call, or has no fallback for it
            if first is None:
                return None
        return None if first is None else Answer(first[0], max(most, first[0]), first[1])

    @cached_property
    def _library(self) -> Library | None:
        if self._path is None:
            return None
        try:
            return Library(self._path, describe(self._card))
        except (OSError, CudnnError) as error:
            self.problem = str(error)
            return None

    @cached_property
    def _known(self) -> dict[str, Answer | None]:
        known: dict[str, Answer | None] = {}
        with contextlib.suppress(OSError):
            for line in self._file.read_text(encoding="utf-8", errors="replace").splitlines():
                key, _, numbers = line.partition("\t")
                with contextlib.suppress(ValueError):  # damaged, or the last line of a process that was killed
                    size, most, is_certain = (int(number) for number in numbers.split("\t"))
                    known[key] = None if size < 0 else Answer(size, most, bool(is_certain))
        return known

    @property
    def _file(self) -> Path:
        machine = self._card.machine
        return self._folder / f"{self.version}-{machine.capability}-{machine.multiprocessors}.tsv"


def _words(version: int) -> str:
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


def describe(card: Card) -> dict[str, Any]:
    """Returns a card's properties under the names of ``CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION``.

    Heuristics of 9.19 depend on the compute capability alone; the others must be there. Clocks, the PCI identifier and
    the cache are those of no card in particular.
    """
    major, minor = card.capability
    architecture = card.architecture
    return {
        "deviceName": card.name,
        "deviceVer": major * 100 + minor * 10,
        "driverVer": 13_000,
        "cudaDeviceId": 0,
        "multiProcessorCount": max(card.machine.multiprocessors, 1),
        "smClockRateKHz": 1_500_000,
        "memClockRateKHz": 1_500_000,
        "l2CacheSize": 40 << 20,
        "totalGlobalMem": card.capacity_bytes,
        "warpSize": 32,
        "regsPerBlock": 65_536,
        "maxRegistersPerSM": 65_536,
        "maxGridSize": [2**31 - 1, 65_535, 65_535],
        "maxBlockSize": [1024, 1024, 64],
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": architecture.threads,
        "maxCtasPerSM": architecture.blocks,
        "maxSharedMemoryPerBlock": 49_152,
        "maxSharedMemoryPerBlockOptin": architecture.shared_bytes - 1024,
        "reservedSharedMemoryPerBlock": 1024,
        "sharedMemoryPerSM": architecture.shared_bytes,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
    }
