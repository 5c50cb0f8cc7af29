"""`memprof mcp`, over stdio with the SDK's own client: an agent's script solves planted cases by tool calls alone."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.errors import UsageError
from memprof.integrations.mcp_server.access import Access, job_words
from memprof.integrations.mcp_server.commands import MOST_BYTES, Outcome, encode, shortened
from tests.integrations.agent_cases import FILES, LEAKS, OUT_OF_MEMORY, leaking_line

if TYPE_CHECKING:
    from mcp import Client

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")

CARD = "rtx4090"
#: Those that a dry run applies.
POLICIES = ["checkpoint", "precision", "accumulate", "optimizer", "swap", "loss"]


class Agent:
    """Calls tools, and checks what holds for every answer."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.progress: list[tuple[float, str | None]] = []

    async def tools(self) -> list[str]:
        return [tool.name for tool in (await self._client.list_tools()).tools]

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        text, is_error = await self._call(tool, arguments)
        assert not is_error, text
        found: dict[str, Any] = json.loads(text)
        return found

    async def refused(self, tool: str, **arguments: Any) -> str:
        text, is_error = await self._call(tool, arguments)
        assert is_error, text
        return text

    async def _call(self, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        async def note(progress: float, total: float | None, message: str | None) -> None:
            self.progress.append((progress, message))

        result = await self._client.call_tool(tool, arguments, progress_callback=note)
        (content,) = result.content
        assert content.type == "text"
        assert len(content.text.encode()) <= MOST_BYTES
        return content.text, bool(result.is_error)


@asynccontextmanager
async def connected(folder: Path, *words: str) -> AsyncIterator[Agent]:
    # Imported by the worker that runs this, not by each that collects it.
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "memprof", "mcp", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
    )
    async with Client(stdio_client(server)) as client:
        yield Agent(client)


def in_session(folder: Path, act: Callable[[Agent], Awaitable[None]], *words: str) -> None:
    async def run() -> None:
        with anyio.fail_after(280):
            async with connected(folder, *words) as agent:
                await act(agent)

    # In a thread of its own: a browser's tests leave an event loop running in the one of the tests.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(anyio.run, run).result()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


async def solve_out_of_memory(agent: Agent, case: str) -> None:
    """Dry-runs, searches for a plan, dry-runs under it; where that does not fit, searches with less."""
    first = await agent.call("dry_run", command=["train.py", case], device=CARD)
    assert "Does not fit on RTX 4090" in " ".join(first["said"]), first["said"]
    run = first["result"]["recording"]
    budget: dict[str, str] = {"machine": CARD}
    for gibibytes in (21.0, 19.0, 17.0, None):
        found = await agent.call(
            "suggest",
            recording=run,
            **budget,
            allow=POLICIES,
        )
        assert found["exit_code"] == 0, found
        planned = await agent.call("dry_run", command=["train.py", case], device=CARD, plan=found["plan"])
        if "Fits on RTX 4090" in " ".join(planned["said"]):
            change = await agent.call("diff", base=run, head=planned["result"]["recording"])
            assert change["result"]["peak"]["change_bytes"] < 0
            return
        assert gibibytes is not None, planned["said"]
        budget = {"budget": f"{gibibytes}GiB"}
    raise AssertionError(case)


async def solve_leak(agent: Agent, case: str) -> None:
    """Records the job, and names the line whose tensors stay, and what holds them."""
    recorded = await agent.call("record", command=["leaking.py", case], steps=4)
    found = await agent.call("leaks", recordings=[recorded["result"]["recording"]])
    assert found["result"]["bytes_per_step"] > 0, found
    worst = max(found["result"]["leaks"], key=lambda leak: leak["bytes_per_step"])
    assert worst["line"] == f"leaking.py:{leaking_line(case)}"
    assert LEAKS[case] in encode(worst["held_by"])


def test_an_agent_makes_a_job_fit(folder: Path) -> None:
    """One job that runs out of memory fits under a plan, with progress; files elsewhere are refused."""

    async def act(agent: Agent) -> None:
        await solve_out_of_memory(agent, "wide-batch")
        assert agent.progress
        assert all(seconds >= 0 for seconds, _ in agent.progress)
        await check_reading(agent)
        await check_refusals(agent, folder)

    in_session(folder, act)


async def check_reading(agent: Agent) -> None:
    """What was recorded in this session can be reported, explained, predicted, and looked into by ids."""
    report = await agent.call("report", recording="run1")
    whole = await agent.call("details", answer=report["answer"], path="at_peak.by_category")
    assert sum(whole["value"].values()) == report["result"]["peak"]["allocated_bytes"]
    assert "peak" in (await agent.call("explain", recording="run1"))["result"].lower()
    assert (await agent.call("explain", recording="run1", base="run1"))["exit_code"] == 0
    predicted = await agent.call("predict", recording="run1", policies={"precision": "bf16"})
    assert predicted["plan"].startswith("plan")
    verified = await agent.call("verify", plan=predicted["plan"], head="run1", recording="run1")
    assert verified["exit_code"] in (0, 3, 4)


async def check_refusals(agent: Agent, folder: Path) -> None:
    """Files outside the folder, unknown ids, policies, parts and commands are refused in a sentence."""
    (folder / "link.memprof").symlink_to("/etc/passwd")
    for name in ("/etc/passwd", "../other.memprof", "link.memprof", "run99", "\0"):
        said = await agent.refused("report", recording=name)
        assert "outside the folders" in said or "neither a file here nor an id" in said
        assert "root:" not in said
    assert "neither a script" in await agent.refused("record", command=["cat", "/etc/passwd"])
    assert "outside the folders" in await agent.refused("dry_run", command=[json.__file__])
    assert "at most 200" in await agent.refused("leaks", recordings=["run1"] * 201)
    for name, value in (("recording", "é" * 9000), ("recording", {"x" * 9000: 1}), ("é" * 9000, 1)):
        await agent.refused("report", **{name: value})  # of at most 4,096 bytes
    assert "unknown policy 'write'" in await agent.refused("predict", recording="run1", policies={"write": "x"})
    assert "no answer 'answer99'" in await agent.refused("details", answer="answer99")
    assert "has no 'nothing'" in await agent.refused("details", answer="answer1", path="nothing")
    assert "is not a size" in await agent.refused("suggest", recording="run1", budget="many")


@pytest.mark.parametrize(
    "command",
    [
        "train.py --epochs 1",
        "-m package.train --lr 1",
        "-m package",
        "torchrun --standalone --nproc-per-node 2 train.py --no-python",
        "torchrun --nproc_per_node=2 -m package.train",
        "-m torch.distributed.run --nnodes 1 --rdzv-endpoint localhost:0 train.py",
        "accelerate launch --cpu --num_processes 2 train.py",
        "lightning run model --devices=2 train.py",
    ],
)
def test_jobs_below_the_roots_are_run(folder: Path, command: str) -> None:
    """Scripts and modules there, also by known launchers, with any arguments of their own."""
    (folder / "package").mkdir()
    for name in ("__init__", "__main__", "train"):
        (folder / "package" / f"{name}.py").write_text("")
    words = job_words(command.split(), Access([folder], folder))
    assert [word for word in words if word != "--"] == command.split()


@pytest.mark.parametrize(
    "command",
    [
        "-m timeit -n1 -r1 print()",
        "-m",
        "-m sys",
        "-m json.tool",
        "-m package",
        "-m train.py",
        "-mtimeit",
        "-c print()",
        "bash -c id",
        "python -c print()",
        "torchrun --no-python bash -c id",
        "torchrun --no-pyth bash.py",
        "torchrun -m timeit",
        "torchrun -m torch.distributed.run --no-python id",
        "torchrun --rdzv-id train.py /elsewhere/evil.py",
        "torchrun --logs-specs=x train.py",
        "torchrun evil",
        "torchrun",
        "-m torch.distributed.run --no_python id train.py",
        "accelerate test",
        "accelerate launch --config_file=/etc/x train.py",
        "deepspeed --launcher_args x train.py",
        "deepspeed --hostfile hosts train.py",
        "../train.py",
        "link.py",
        "",
    ],
)
def test_other_commands_are_refused(folder: Path, command: str) -> None:
    """Modules elsewhere, programs, and options of launchers that could start a program or read a file elsewhere."""
    (folder / "link.py").symlink_to(json.__file__)
    (folder / "package").mkdir()
    (folder / "package" / "__main__.py").symlink_to(json.__file__)
    (folder.parent / "train.py").write_text("")
    with pytest.raises(UsageError):
        job_words(command.split(), Access([folder], folder))


def test_an_answer_full_of_quotes_is_short_and_marked_as_data(folder: Path) -> None:
    """Escaped letters count as they are sent, and the answer names the parts that are data from jobs."""
    from memprof.integrations.mcp_server.tools import Tools

    done = Outcome(0, "", tuple('"\\\n' * 900 for _ in range(9)), "")
    answer = Tools(Access([folder], folder))._answer({"x": ['"' * 9000] * 9}, done, {})
    assert len(answer.encode()) <= MOST_BYTES
    assert json.loads(answer)["data_not_instructions"] == ["said", "result"]


@pytest.mark.slow
@pytest.mark.parametrize("case", OUT_OF_MEMORY)
def test_an_agent_makes_every_job_fit(folder: Path, case: str) -> None:
    """Ten jobs that run out of memory on a virtual card fit after at most four plans, as dry-run under them."""
    in_session(folder, lambda agent: solve_out_of_memory(agent, case))


@pytest.mark.slow
@pytest.mark.parametrize("case", LEAKS)
def test_an_agent_finds_every_leak(folder: Path, case: str) -> None:
    """Five leaks: the line that makes what stays, and what holds it."""
    in_session(folder, lambda agent: solve_leak(agent, case))


@pytest.mark.slow
def test_a_cancelled_call_ends_its_job(folder: Path) -> None:
    """A job that would run for minutes is gone soon after the caller gave up, and the server answers on."""
    (folder / "endless.py").write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(250)\n"
    )

    async def act(agent: Agent) -> None:
        async with anyio.create_task_group() as calls:
            calls.start_soon(lambda: agent.call("record", command=["endless.py"]))
            with anyio.fail_after(60):
                while not (folder / "pid").exists() or not (folder / "pid").read_text():
                    await anyio.sleep(0.1)
            calls.cancel_scope.cancel()
        with anyio.fail_after(30):
            while psutil.pid_exists(int((folder / "pid").read_text())):
                await anyio.sleep(0.1)
        assert "no answer" in await agent.refused("details", answer="answer1")

    in_session(folder, act)


def test_a_server_that_runs_nothing_offers_no_tool_for_it(folder: Path) -> None:
    """With --no-run, only the tools that read are listed."""

    async def act(agent: Agent) -> None:
        tools = await agent.tools()
        assert {"report", "suggest", "predict", "verify", "diff", "leaks", "explain", "details"} == set(tools)

    in_session(folder, act, "--no-run")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=200),
    lambda inside: st.lists(inside, max_size=30) | st.dictionaries(st.text(max_size=12), inside, max_size=30),
    max_leaves=200,
)


@settings(max_examples=40)
@given(JSON, st.integers(120, 4096))
def test_no_answer_is_longer_than_allowed(value: Any, limit: int) -> None:
    """Whatever an answer holds, its JSON has at most the bytes allowed, and one that is short is whole."""
    short = shortened(value, limit)
    assert len(encode(short).encode()) <= limit
    if len(encode(value).encode()) <= limit:
        assert short == value


def test_small_parts_are_kept_whole() -> None:
    """A figure beside long lists is there, lists begin with their first entries, and what is left out is counted."""
    value = {
        "plans": [{"name": "é" * 50, "values": list(range(30))} for _ in range(200)],
        "text": "x" * 9000,
        "peak": 17,
    }
    short = shortened(value, 2000)
    assert short["peak"] == 17
    assert short["plans"][0] == value["plans"][0]
    assert re.fullmatch(r"\.\.\. \d+ more", short["plans"][-1])
    assert short["text"].endswith("... (9000 characters)")
    assert len(encode(short).encode()) > 1700
    assert shortened({str(number): "x" * 100 for number in range(1000)}, 2000)["..."].endswith("more")
