"""Trains R(2+1)D-34 on 6 clips of 32 frames, one GPU's share of Kinetics-400."""

from families.video import R2Plus1D, train

if __name__ == "__main__":
    train(R2Plus1D(400), parameters=63_759_281, clips=(6, 32, 224), classes=400)
