"""Workspaces of convolutions on a card: cuDNN chooses them at run time, by no public rule."""

from __future__ import annotations

#: Most bytes of a call, and in backward the weight's besides.
MOST_BYTES = 128 << 20
SOURCE = (
    "a snapshot of a ResNet-50 under torch 2.1, in which 26 of 53 convolutions take 134,217,728 bytes and gradients of "
    "weights as many and the weight's"
)


def workspace_interval(estimated_bytes: int, weight_bytes: int) -> tuple[int, int]:
    """Returns how much less and how much more a job may take than with the estimated workspaces.

    One call runs at a time, and its workspace is freed after it: the peak differs by one call's at most.

    Args:
        estimated_bytes: The largest workspace estimated for a call.
        weight_bytes: The largest weight of a convolution.

    Returns:
        A number that is not positive, and one that is positive.
    """
    return -estimated_bytes, MOST_BYTES + weight_bytes
