"""Datasets of random images, as many as the environment variable UNSEEN_IMAGES says, and folders of images."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset


class _RandomImages(Dataset[tuple[Any, int]]):
    """Images of random pixels with random labels; the same ones in every run."""

    shape: tuple[int, ...] = (28, 28)
    classes = tuple(str(digit) for digit in range(10))

    def __init__(
        self,
        root: str = "",
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        download: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(int(train))
        count = int(os.environ.get("UNSEEN_IMAGES", "128"))
        self.data = torch.randint(0, 256, (count, *self.shape), generator=generator, dtype=torch.uint8)
        self.targets = torch.randint(0, len(self.classes), (count,), generator=generator)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(self.data[index].numpy())
        return (self.transform(image) if self.transform else image), int(self.targets[index])


class MNIST(_RandomImages):
    """Grey images of 28 x 28."""


class FashionMNIST(_RandomImages):
    """Grey images of 28 x 28."""


class CIFAR10(_RandomImages):
    """Colour images of 32 x 32."""

    shape = (32, 32, 3)


class FakeData(_RandomImages):
    """Colour images of any size."""

    def __init__(
        self,
        size: int = 1000,
        image_size: tuple[int, int, int] = (3, 224, 224),
        num_classes: int = 10,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.shape = (*image_size[1:], image_size[0])
        self.classes = tuple(str(number) for number in range(num_classes))
        super().__init__(transform=transform)


class ImageFolder(Dataset[tuple[Any, int]]):
    """Images in folders named after their classes."""

    def __init__(self, root: str, transform: Callable[[Any], Any] | None = None) -> None:
        self.files = sorted(Path(root).glob("*/*.png"))
        self.classes = sorted({file.parent.name for file in self.files})
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.open(self.files[index]).convert("RGB")
        return (self.transform(image) if self.transform else image), self.classes.index(self.files[index].parent.name)
