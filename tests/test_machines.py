"""The catalogue of accelerators, and budgets given as a size, a share or a machine."""

from __future__ import annotations

import pytest

from memprof.errors import UsageError
from memprof.machines.budget import HostBudget, parse_budget, split_budget
from memprof.machines.card import architecture_of, find_card
from memprof.machines.catalogue import (
    CONTEXT_BYTES,
    LEAST_USABLE_SHARE,
    PRECISIONS,
    Accelerator,
    accelerators,
    find_machine,
    machine_of_device,
)

GIB = 2**30


@pytest.mark.parametrize("machine", accelerators(), ids=lambda machine: machine.name)
def test_figures_are_whole_and_sourced(machine: Accelerator) -> None:
    """Every machine says where its figures are from, and none of them is out of the range of what is built."""
    assert machine.source
    assert 8 * GIB <= machine.memory_bytes <= 512 * GIB
    is_unified = machine.note.startswith("unified memory")
    if machine.memory_bytes_per_us or "contradict" not in machine.note:
        assert (60e3 if is_unified else 200e3) <= machine.memory_bytes_per_us <= 20e6
    assert set(machine.flops_per_us) <= set(PRECISIONS)
    assert all(1e6 < rate < 1e10 for rate in machine.flops_per_us.values())
    assert bool(machine.usable_bytes) == bool(machine.usable_source)
    if machine.usable_bytes:
        least_share = 2 / 3 - 0.01 if is_unified else LEAST_USABLE_SHARE
        assert least_share * machine.memory_bytes - 1 <= machine.usable_bytes <= machine.memory_bytes
    assert 0 < machine.budget_bytes < machine.memory_bytes


@pytest.mark.parametrize("machine", accelerators(), ids=lambda machine: machine.name)
def test_shorter_types_are_not_slower(machine: Accelerator) -> None:
    """A mistyped rate shows: on every machine, the shorter of two types multiplies at least as fast."""
    rates = [machine.flops_per_us[kind] for kind in ("fp32", "tf32", "bf16", "fp8") if kind in machine.flops_per_us]
    assert rates == sorted(rates)
    if "bf16" in machine.flops_per_us:
        assert machine.flops_per_us["bf16"] == machine.flops_per_us["fp16"]


def test_figures_of_one_machine_in_memprofs_units() -> None:
    """The RTX 3090 has what its whitepaper says: 24 GB, 936 GB/s, 71 TFLOPS in bf16, PCIe 4.0 x16."""
    machine = find_machine("rtx3090")
    assert machine.memory_bytes == 24 * GIB
    assert machine.memory_bytes_per_us == 936_000
    assert machine.flops_per_us["bf16"] == 71e6
    assert machine.host_bytes_per_us == 32_000
    assert machine.budget_bytes == int(23.70 * GIB) - CONTEXT_BYTES
    assert "rule" in machine.budget_source


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("rtx3090", "RTX 3090"),
        ("RTX 3090", "RTX 3090"),
        (" rtx-3090 ", "RTX 3090"),
        ("3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("m1-max-32gb", "Apple M1 Max 32GB"),
        ("l40", "L40"),
        ("gb200", "GB200"),
        ("dgx spark", "GB10"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("h20", "H20"),
        ("NVIDIA GeForce RTX 5060", "RTX 5060"),
        ("rtx 5060 ti 16gb", "RTX 5060 Ti 16GB"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("h200", "H200"),
        ("AMD Instinct MI250", "MI250"),
        ("mi250x", "MI250X"),
        ("NVIDIA Thor", "Jetson Thor"),
        ("jetson agx thor", "Jetson Thor"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server Edition"),
        ("pro 6000 blackwell max-q workstation edition", "RTX PRO 6000 Blackwell"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("7900 xtx", "Radeon RX 7900 XTX"),
        ("w7900", "Radeon PRO W7900"),
        ("m4 max 128gb", "Apple M4 Max 128GB"),
        ("Ascend910B3", "Ascend 910B"),
        ("gaudi3", "Gaudi 3"),
    ],
)
def test_names_are_found_however_they_are_written(written: str, name: str) -> None:
    """A machine is found under its short name and the driver's, whatever the case, spaces and dashes."""
    assert find_machine(written).name == name


def test_no_two_machines_share_a_name() -> None:
    """Every name and every alias of the catalogue leads back to its own machine."""
    for machine in accelerators():
        assert [find_machine(name).name for name in (machine.name, *machine.aliases)] == [machine.name] * (
            1 + len(machine.aliases)
        )


def test_name_of_several_machines_asks_which() -> None:
    """A name that two machines begin with is not guessed: they hold different amounts."""
    with pytest.raises(UsageError, match=r"ambiguous device 'rtx 3080': write RTX 3080 10GB or"):
        find_machine("rtx 3080")


@pytest.mark.parametrize(("written", "near"), [("rtx3909", "RTX 3090"), ("h2000", "H200"), ("gtx4090", "RTX 4090")])
def test_near_names_are_named(written: str, near: str) -> None:
    """A slip of the pen is answered with what may have been meant."""
    with pytest.raises(UsageError, match=rf"did you mean .*{near}"):
        find_machine(written)


@pytest.mark.parametrize(
    ("written", "offered", "others"),
    [
        ("gb110", "GB10", "GB200"),
        ("rtx 6000", "RTX 6000 Ada", "5090"),
        ("rtx 2080", "RTX 2080 Ti", "3080"),
        ("m4 ultra", "", "M3 Ultra"),
        ("b100", "", "did you mean"),
        ("h800", "", "did you mean"),
        ("mi400", "", "did you mean"),
        ("rtx 5050", "RTX 5060", "2080"),
        ("h200 pcie", "H200", "H20,"),
        ("mi280", "MI250", "MI300"),
        ("jetson orin", "", "did you mean"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "a MIG slice has a part", "did you mean"),
        ("5090 laptop", "laptop GPUs are other chips", "did you mean"),
        ("TPU v5e", "memprof does not predict XLA", "did you mean"),
        ("Arc B580", "", "did you mean"),
        ("Ryzen AI Max 395", "", "did you mean"),
        ("a800", "", "did you mean"),
    ],
)
def test_no_name_stands_for_another_architecture(written: str, offered: str, others: str) -> None:
    """What is offered for an unknown name has its letters and its generation's digit; another chip is not chosen."""
    with pytest.raises(UsageError) as refused:
        find_machine(written)
    sentence = str(refused.value).partition(", or one of")[0]
    assert offered in sentence
    assert others not in sentence


def test_a_machine_like_another_has_its_chip_and_what_it_states() -> None:
    """The larger of two has the same rates and links; usable memory and notes are stated for one machine alone."""
    small, large = find_machine("a100 40gb"), find_machine("a100 80gb")
    assert (small.flops_per_us, small.peer_bytes_per_us) == (large.flops_per_us, large.peer_bytes_per_us)
    assert large.memory_bytes == 2 * small.memory_bytes
    assert find_machine("rtx 5060 ti 8gb").usable_bytes == 0
    assert find_machine("m4 16gb").budget_source.startswith("67% of its memory")


def test_beginning_of_one_name_is_enough() -> None:
    """What only one machine begins with is that machine; letters of a chip count: there is an MI300A, too."""
    assert find_machine("m1 max").name == "Apple M1 Max 32GB"
    with pytest.raises(UsageError, match="did you mean MI300X"):
        find_machine("mi300")


def test_unknown_machine_is_one_sentence_with_a_way_out() -> None:
    """A name close to no machine's is refused with exit code 2, and the message offers a size instead."""
    with pytest.raises(UsageError, match=r"^unknown device 'abacus': give --budget 24GiB") as caught:
        find_machine("abacus")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert machine_of_device("AMD EPYC") is None


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("8GiB", 8 * GIB),
        ("24GB", 24 * 10**9),
        ("6000000000", 6 * 10**9),
        ("60%", 600),
        (" 60 % ", 600),
        ("12.5%", 125),
        ("33.33%", 333),
        ("150%", 1500),
    ],
)
def test_budgets_are_sizes_or_shares_of_the_peak(text: str, budget: int) -> None:
    """A budget is a size, or a share of the recorded peak (here 1000 bytes), never rounded up."""
    assert parse_budget(text, 1000) == budget


def test_machine_alone_is_a_budget() -> None:
    """Without a size, the budget is what tensors can take on the machine; with one, the machine only limits it."""
    machine = find_machine("rtx3090")
    assert parse_budget(None, 1000, machine) == machine.budget_bytes
    assert parse_budget("8GiB", 1000, machine) == 8 * GIB
    with pytest.raises(UsageError, match=r"budget 32\.00 GiB exceeds the memory of RTX 3090: 24\.00 GiB"):
        parse_budget("32GiB", 1000, machine)


def test_only_a_devices_budget_leaves_room() -> None:
    """What a job takes beyond its tensors is not even computed for a size or a share, which limit allocated bytes."""
    machine, computed = find_machine("rtx3090"), []

    def room() -> int:
        computed.append(GIB)
        return GIB

    assert parse_budget("8GiB", 1000, machine, room) == 8 * GIB
    assert parse_budget("60%", 1000, None, room) == 600
    assert computed == []
    assert parse_budget(None, 1000, machine, room) == machine.budget_bytes - GIB
    assert computed == [GIB]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "a budget is needed"),
        ("", "is not a size"),
        ("lots", "is not a size"),
        ("24G", "can be read in two ways"),
        ("-8GiB", "must be positive"),
        ("0", "must be positive"),
        ("0%", "must be more than 0%"),
        ("-5%", "must be more than 0%"),
        ("%", "invalid share of the recorded peak"),
        ("8GiB%", "invalid share of the recorded peak"),
        ("5%%", "invalid share of the recorded peak"),
        ("1000000000000%", "more than a hundred times"),
        ("0.00001%", "is less than one byte"),
    ],
)
def test_nonsense_is_one_clear_sentence(text: str | None, sentence: str) -> None:
    """An invalid budget is refused with a message, and exit code 2."""
    with pytest.raises(UsageError, match=sentence) as caught:
        parse_budget(text, 1000)
    assert "\n" not in str(caught.value)


def test_share_of_nothing_is_refused() -> None:
    """A recording without a peak has no shares."""
    with pytest.raises(UsageError, match="this recording has none"):
        parse_budget("60%", 0)


def test_every_nvidia_machine_has_an_architecture() -> None:
    """What torch does there is known for every compute capability of the catalogue; makers without one have none."""
    for machine in accelerators():
        architecture = architecture_of(machine.capability)
        assert (architecture is None) == (machine.capability == ""), machine.name
        if architecture is not None:
            assert architecture.cublas_workspace_bytes % 512 == 0
            assert set(architecture.attention) <= {"cudnn", "flash", "efficient"}


@pytest.mark.parametrize(
    ("written", "name"),
    [("a100-80g", "A100 80GB"), ("A100 80GiB", "A100 80GB"), ("h100-80g", "H100 SXM"), ("a100-40g", "A100 40GB")],
)
def test_sizes_may_be_written_short(written: str, name: str) -> None:
    """80g, 80gb and 80gib are one size."""
    assert find_machine(written).name == name


def test_a_card_can_be_found_by_the_name_it_gives_itself() -> None:
    """A dry run's recording names its device as the catalogue does."""
    card = find_card("rtx4090")
    assert machine_of_device(card.describe("cuda:0")["name"]) is card.machine
    assert card.capability == (8, 9)
    with pytest.raises(UsageError, match="dry runs on MI300X are unsupported"):
        find_card("mi300x")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, (None, HostBudget())),
        ("60%", ("60%", HostBudget())),
        ("24GiB,host=32GiB,pinned=2GiB", ("24GiB", HostBudget(32 * GIB, 2 * GIB))),
        ("pinned=2GiB", (None, HostBudget(pinned_bytes=2 * GIB))),
        ("host=1GiB,60%", ("60%", HostBudget(GIB))),
        ("unified=96GiB", ("96GiB", HostBudget(is_unified=True))),
    ],
)
def test_a_budget_may_have_a_part_for_the_host(text: str | None, parts: tuple[str | None, HostBudget]) -> None:
    """Of the whole job, of copies, or one for device and host together."""
    assert split_budget(text) == parts


@pytest.mark.parametrize(
    "text",
    ["8GiB,disk=1GiB", "8GiB,9GiB", "8GiB,host=1GiB,host=2GiB", "8GiB,host=", "host=2x", "unified=8GiB,host=1GiB"],
)
def test_refuses_parts_of_a_budget_that_say_nothing(text: str) -> None:
    """A wrong name, a second size, a repeated part or no size."""
    with pytest.raises(UsageError):
        split_budget(text)
