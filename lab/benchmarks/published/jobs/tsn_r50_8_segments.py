"""Trains TSN of ResNet-50 on 32 videos of 8 frames, one GPU's share of Kinetics-400."""

from families.resnet50 import classify_videos

if __name__ == "__main__":
    classify_videos(videos=32, segments=8, classes=400)
