"""Trains U-Net on 4 crops of 256 x 256, one GPU's share of HRF."""

from families.unet import train

if __name__ == "__main__":
    train(256, 256, classes=2, parameters=29_060_676)
