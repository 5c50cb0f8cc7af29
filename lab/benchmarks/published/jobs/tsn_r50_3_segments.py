"""Trains TSN of ResNet-50 on 32 videos of 3 frames, one GPU's share of UCF-101."""

from families.resnet50 import classify_videos

if __name__ == "__main__":
    classify_videos(videos=32, segments=3, classes=101)
