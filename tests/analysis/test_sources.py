"""The user's line of code in a stack."""

from __future__ import annotations

import pytest

from memprof.analysis.report.sources import find_sources, is_library
from memprof.trace.schema import Stacks

TORCH = "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py:125:forward"


def stacks(*frames: str) -> Stacks:
    return Stacks.of(stack_id=range(len(frames)), frames=list(frames))


@pytest.mark.parametrize(
    "file",
    [
        "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py",
        "/usr/lib/python3/dist-packages/torch/_ops.py",
        "/usr/lib/python3.12/contextlib.py",
        "/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py",
        "C:\\Python311\\Lib\\contextlib.py",
        "<frozen runpy>",
        "/tmp/torchinductor_me/ry/cry4r2zexmr5f.py",
        "/opt/memprof/launch/bootstrap/sitecustomize.py",
    ],
)
def test_torch_and_the_standard_library_are_no_users_code(file: str) -> None:
    """Such frames are passed over wherever Python is installed."""
    assert is_library(file)


@pytest.mark.parametrize(
    "file",
    [
        "/home/u/torch/train.py",
        "/opt/venv/lib/python3.11/site-packages/transformers/models/gpt2/modeling_gpt2.py",
        "/opt/venv/lib/python3.11/site-packages/torchvision/models/resnet.py",
        "train.py",
        "<stdin>",
        "/home/u/memprof/train.py",
    ],
)
def test_other_code_is_the_users(file: str) -> None:
    """A folder that happens to be called torch is the user's, and so are libraries built on torch."""
    assert not is_library(file)


def test_the_innermost_frame_of_the_user_is_the_source() -> None:
    """Of torch, model, train the model's line is named, below the folder that the job's files share."""
    sources = find_sources(stacks(f"{TORCH}\n/job/net/model.py:57:forward\n/job/train.py:12:main"))
    line = sources.of_stack(0)
    assert line is not None
    assert (line.file, line.line, line.function, line.place) == ("/job/net/model.py", 57, "forward", "net/model.py:57")
    assert [one.place for one in sources.user_frames[0]] == ["net/model.py:57", "train.py:12"]


def test_places_are_below_the_folder_all_files_share() -> None:
    """One folder for the model and one for the script: both are named; installed packages start at their name."""
    sources = find_sources(
        stacks(
            "/home/me/job/net/model.py:57:forward\n/home/me/job/bin/train.py:12:main",
            "/v/lib/python3.11/site-packages/transformers/gpt2.py:3:forward",
        )
    )
    places = [line.place for frames in sources.user_frames for line in frames]
    assert places == ["net/model.py:57", "bin/train.py:12", "transformers/gpt2.py:3"]


def test_a_stack_of_torch_alone_falls_back_to_its_innermost_frame() -> None:
    """Something is better than nothing."""
    line = find_sources(stacks(TORCH)).of_stack(0)
    assert line is not None
    assert line.place == "torch/nn/modules/linear.py:125"


@pytest.mark.parametrize("frame", ["C:\\job\\train.py:12:main", "weird", "a:b:c", "<ipython-input-3>:1:<module>"])
def test_odd_frames_are_kept(frame: str) -> None:
    """A file's name may hold colons, and a frame that cannot be read is still shown."""
    line = find_sources(stacks(frame)).of_stack(0)
    assert line is not None
    assert line.file in frame
