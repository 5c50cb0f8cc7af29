"""Trains C3D on 30 clips of 16 frames, one GPU's share of UCF-101."""

from families.video import C3D, train

if __name__ == "__main__":
    train(C3D(101), parameters=78_409_573, clips=(30, 16, 112), classes=101)
