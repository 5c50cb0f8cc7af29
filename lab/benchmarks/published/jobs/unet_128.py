"""Trains U-Net on 4 crops of 128 x 128, one GPU's share of STARE."""

from families.unet import train

if __name__ == "__main__":
    train(128, 128, classes=2, parameters=29_060_676)
