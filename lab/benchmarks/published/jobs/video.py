"""Trains one GPU's share of a network for videos, as MMAction2 did, and prints the peak of allocated bytes.

The argument is a name in NETWORKS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from families.older_softmax import use_older_softmax
from families.resnet50 import SegmentNetwork
from families.timesformer import TimeSformer
from families.video import train
from families.video_resnet import SlowFast, make_inflated, make_separated, make_slow_only
from torch import nn

#: Network, its parameters, shape of a batch [clips, frames, pixels of a side].
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, int, int]]] = {
    "slowfast": (SlowFast, 34_479_288, (8, 32, 224)),
    "i3d": (make_inflated, 28_043_472, (8, 32, 224)),
    "slowonly": (make_slow_only, 32_454_096, (8, 4, 224)),
    "slowonly_24_clips": (make_slow_only, 32_454_096, (24, 4, 224)),
    "slowonly_8_frames": (make_slow_only, 32_454_096, (8, 8, 224)),
    "timesformer_divided": (lambda: TimeSformer("divided"), 121_566_352, (8, 8, 224)),
    "timesformer_joint": (lambda: TimeSformer("joint"), 86_112_400, (7, 8, 224)),
    "timesformer_space": (lambda: TimeSformer("space"), 86_106_256, (8, 8, 224)),
    "csn_frozen_norms": (lambda: make_separated(has_frozen_norms=True), 29_703_568, (3, 32, 224)),
    "csn": (lambda: make_separated(has_frozen_norms=False), 29_703_568, (3, 32, 224)),
    "new_slowonly": (make_slow_only, 32_454_096, (16, 4, 224)),
    "new_timesformer_divided": (lambda: TimeSformer("divided"), 121_566_352, (8, 8, 224)),
    "new_tsn_16_segments": (lambda: SegmentNetwork(16, 174), 23_864_558, (32, 16, 224)),
}


def main(name: str) -> None:
    """Trains the network; with MMAction2 1.x, and torch 2.0, where its name begins so."""
    make, parameters, clips = NETWORKS[name]
    is_new = name.startswith("new_")
    if not is_new:
        use_older_softmax()
    is_nesterov, of_frames = "timesformer" in name, "tsn" in name
    classes = 174 if of_frames else 400
    train(make(), parameters, clips, classes, is_new=is_new, is_nesterov=is_nesterov, of_frames=of_frames)


if __name__ == "__main__":
    main(sys.argv[1])
