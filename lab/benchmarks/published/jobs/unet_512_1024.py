"""Trains U-Net on 4 crops of 512 x 1024, one GPU's share of Cityscapes."""

from families.unet import train

if __name__ == "__main__":
    train(512, 1024, classes=19, parameters=29_062_886)
