"""Looks up an accelerator by a common or driver name: capacity, speed and sources.

The figures are in ``catalogue.toml`` next to this file, in the units of the data sheets they come from, each with its
source; figures without a source are left out. They are vendor peaks, of which a job reaches a part.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from memprof.errors import UsageError
from memprof.units import format_bytes

#: Data types of matrix products, in table order.
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")

#: Memory in use before the first tensor: the CUDA context, its kernels and library handles. A rule: processes that hold
#: nothing else take 148 to 666 MiB in published out-of-memory messages.
CONTEXT_BYTES = 768 * 2**20

#: Share of memory available to torch, where no figure is published for the machine: the smallest published share (T4:
#: 14.56 of 16 GiB).
LEAST_USABLE_SHARE = 0.91
#: The same of what Metal recommends, on Apple's machines: 10.66 of 16 GiB.
LEAST_METAL_SHARE = 0.666
_UNIFIED = "unified memory"
_APPLE, _METAL = "Apple ", f"{_UNIFIED}: Metal's recommended maximum"

#: Least compute capability with bfloat16 in hardware.
_FIRST_BF16 = 8.0

#: Words that do not distinguish machines.
_MAKERS = re.compile(r"apple|nvidia|amd|intel|huawei|ascend|geforce|rtx|tesla|quadro|instinct|radeon|\brx|graphics")

#: What a name may leave out: the rest tells devices of one chip apart.
_REST = re.compile(r"(sxm\d?|pcie|nvl)?(\d+gb)?(hbm\d)?")

#: Names of what is no card of the catalogue and must not be taken for one that it resembles, and what to do.
_NO_CARD = (
    (
        re.compile(r"\bmig\b|\d+g\.\d+gb", re.IGNORECASE),
        "a MIG slice has a part of a card's memory; give what torch reports there as total, such as --budget 9.5GiB.",
    ),
    (
        re.compile(r"laptop|mobile", re.IGNORECASE),
        "laptop GPUs are other chips, with other memory, than cards of the same number; give --budget 24GiB instead.",
    ),
    (
        re.compile(r"tpu|\bv\d[ep]?\b", re.IGNORECASE),
        "memprof does not predict XLA, which plans a TPU's memory by itself; give --budget 16GiB to plan as for a GPU.",
    ),
)

#: What of a machine is not that of another with the same chip.
_OWN = {"like", "aliases", "note", "usable_gib"}


@dataclass(frozen=True)
class Accelerator:
    """An accelerator as described by its vendor.

    Attributes:
        name: Its short name, such as ``RTX 3090``.
        aliases: Its other names, including those that drivers report.
        memory_bytes: Memory on the board.
        usable_bytes: Maximum bytes available to torch; 0 where no figure is published.
        memory_bytes_per_us: Memory bandwidth; 0 where no figure is published.
        host_bytes_per_us: Bandwidth to the host in one direction; 0 where no figure is published.
        peer_bytes_per_us: Bandwidth to other accelerators in one direction, all links together; 0 without a link.
        flops_per_us: Dense matrix product rate by type (PRECISIONS); a type without a figure is missing.
        source: Data sheet of the figures.
        capability: Compute capability, such as ``8.0``; "" where not applicable.
        multiprocessors: Streaming multiprocessors; 0 where not applicable.
        usable_source: Source of ``usable_bytes``.
        note: Additional remark, a clause.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_us: float
    source: str
    capability: str = ""
    multiprocessors: int = 0
    aliases: tuple[str, ...] = ()
    usable_bytes: int = 0
    host_bytes_per_us: float = 0.0
    peer_bytes_per_us: float = 0.0
    flops_per_us: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    usable_source: str = ""
    note: str = ""

    @property
    def is_unified(self) -> bool:
        """Whether the host's memory is the same."""
        return self.note.startswith(_UNIFIED)

    @property
    def short_types(self) -> tuple[str, ...]:
        """Types shorter than float32 it computes in, by their torch names: bfloat16 on NVIDIA's from Ampere on."""
        has_bf16 = not self.capability or float(self.capability) >= _FIRST_BF16
        return ("bfloat16", "float16") if has_bf16 else ("float16",)

    @property
    def capacity_bytes(self) -> int:
        """Maximum bytes available to torch: as reported there, else the smallest published share."""
        return self.usable_bytes or int(self.memory_bytes * self._least_share)

    @property
    def budget_bytes(self) -> int:
        """Bytes available to tensors: the capacity without the context."""
        return self.capacity_bytes - CONTEXT_BYTES

    @property
    def budget_source(self) -> str:
        """Source of ``budget_bytes``, a clause: measured by others, or a rule."""
        taken = f"without {format_bytes(CONTEXT_BYTES)} for the context"
        if self.usable_bytes:
            return f"the capacity that torch reports on it, {taken} (rule)"
        return f"{self._least_share:.0%} of its memory, {taken} (rule)"

    @property
    def _least_share(self) -> float:
        return LEAST_METAL_SHARE if self.name.startswith(_APPLE) else LEAST_USABLE_SHARE


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """Returns every accelerator of the catalogue, in order."""
    text = Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = {}
    for name, row in tomllib.loads(text).items():
        same = rows[row["like"]] if "like" in row else {}
        own = row | row.pop("chip", {}) | row.pop("memory", {}) | row.pop("links", {})
        own = {key: value for key, value in same.items() if key not in _OWN} | own
        sizes = own["gib"] if isinstance(own["gib"], list) else ()
        rows |= {f"{name} {gib}GB": own | {"gib": gib} for gib in sizes} or {name: own}
    return tuple(_read(name, row) for name, row in rows.items())


def find_machine(name: str) -> Accelerator:
    """Looks up an accelerator; case, spaces, dashes and vendor names are ignored.

    Args:
        name: Such as ``rtx3090``, ``RTX 3090``, ``a100-80gb`` or ``NVIDIA H100 80GB HBM3``.

    Raises:
        UsageError: Unknown or ambiguous name; the message lists close matches.
    """
    key = _key(name)
    keys = _by_key()
    if key in keys:
        return keys[key]
    begun = {
        keys[known].name: keys[known]
        for known in keys
        if key and known.startswith(key) and _REST.fullmatch(known[len(key) :])
    }
    if len(begun) == 1:
        return next(iter(begun.values()))
    if begun:
        raise UsageError(f"ambiguous device {name!r}: write {_listed(list(begun))}.")
    for pattern, reason in _NO_CARD:
        if pattern.search(name):
            raise UsageError(f"unknown device {name!r}: {reason}")
    # A slip changes neither the letters of a family nor the first digit of a generation.
    family = _family(key)
    related = [known for known in keys if _family(known) == family and (family or known.startswith(key))]
    longer = [known for known in related if key and known.startswith(key)]
    alike = longer or related
    near = difflib.get_close_matches(key, alike, n=4, cutoff=0.3 if longer else 0.6)
    if near:
        names = list(dict.fromkeys(keys[each].name for each in near))
        raise UsageError(f"unknown device {name!r}; did you mean {_listed(names)}?")
    known_names = ", ".join(machine.name for machine in accelerators())
    raise UsageError(f"unknown device {name!r}: give --budget 24GiB instead, or one of {known_names}.")


def machine_of_device(device_name: str) -> Accelerator | None:
    """Looks up the accelerator by the name its driver reports; None where unknown."""
    return _by_key().get(_key(device_name))


def product_rates(flops_per_us: Mapping[str, float]) -> tuple[float, float]:
    """Returns the rates of matrix products in float32 and in the short type of a device: bfloat16, else fp16.

    Args:
        flops_per_us: Rates by type, as ``Accelerator`` has them; 0 is returned for what is missing.
    """
    plain = flops_per_us.get("fp32", 0.0)
    return plain, flops_per_us.get("bf16", flops_per_us.get("fp16", plain))


@cache
def _by_key() -> dict[str, Accelerator]:
    return {_key(name): machine for machine in accelerators() for name in (machine.name, *machine.aliases)}


def _key(name: str) -> str:
    """Reduces a name to its distinguishing part; ``80g`` and ``80gib`` are ``80gb``."""
    plain = re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", name.lower()))
    return re.sub(r"(\d)g(ib)?$", r"\1gb", plain)


def _family(key: str) -> str:
    """Returns the letters before the first digit, and that digit; "" for a name without one."""
    found = re.match(r"(?:gtx)?([a-z]*\d)", key)
    return found[1] if found else ""


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _read(name: str, row: dict[str, Any]) -> Accelerator:
    """Converts the data sheet's units to bytes and microseconds: 1 GB/s is 1000 bytes per microsecond."""
    sources = row["source"]
    source, usable_source = (sources, "") if isinstance(sources, str) else sources
    return Accelerator(
        name=name,
        capability=row.get("capability", ""),
        multiprocessors=row.get("multiprocessors", 0),
        aliases=tuple(row.get("aliases", ())),
        memory_bytes=int(row["gib"] * 2**30),
        usable_bytes=int(row.get("usable_gib", 0) * 2**30),
        memory_bytes_per_us=row.get("gb_s", 0) * 1e3,
        host_bytes_per_us=row.get("host_gb_s", 0) * 1e3,
        peer_bytes_per_us=row.get("peer_gb_s", 0) * 1e3,
        flops_per_us=MappingProxyType({kind: rate * 1e6 for kind, rate in row.get("tflops", {}).items()}),
        source=source,
        usable_source=usable_source if "usable_gib" in row else "",
        note=_METAL if name.startswith(_APPLE) else row.get("note", ""),
    )
