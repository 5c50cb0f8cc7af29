"""Trains U-Net on 4 crops of 64 x 64, one GPU's share of DRIVE."""

from families.unet import train

if __name__ == "__main__":
    train(64, 64, classes=2, parameters=29_060_676)
