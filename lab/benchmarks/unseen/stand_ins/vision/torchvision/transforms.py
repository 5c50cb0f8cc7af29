"""The transforms that the scripts use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

Pixels = Image.Image


class Compose:
    """One transform after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class Lambda:
    """A function as a transform."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, image: Any) -> Any:
        return self.function(image)


class ToTensor:
    """Channels, height, width; values of 0 to 1."""

    def __call__(self, image: Pixels) -> torch.Tensor:
        values = torch.from_numpy(np.array(image)).float().div(255)
        return values[None] if values.dim() == 2 else values.permute(2, 0, 1).contiguous()


class Normalize:
    """Less the mean, over the deviation."""

    def __init__(self, mean: Any, std: Any) -> None:
        self.mean, self.std = torch.as_tensor(mean).view(-1, 1, 1), torch.as_tensor(std).view(-1, 1, 1)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean) / self.std


class Resize:
    """Scales the shorter side to a size, or both to two."""

    def __init__(self, size: int | tuple[int, int]) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        if isinstance(image, torch.Tensor):
            assert isinstance(self.size, int)
            return torch.nn.functional.interpolate(image[None], self.size)[0]
        if isinstance(self.size, tuple):
            return image.resize(self.size[::-1])
        scale = self.size / min(image.size)
        return image.resize((round(image.width * scale), round(image.height * scale)))


class CenterCrop:
    """Cuts a square out of the middle, with black around it where the image is smaller."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Pixels) -> Pixels:
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        return image.crop((left, top, left + self.size, top + self.size))


class RandomCrop:
    """Cuts a square out of an image with a border."""

    def __init__(self, size: tuple[int, int], padding: int) -> None:
        self.size, self.padding = size, padding

    def __call__(self, image: Pixels) -> Pixels:
        (height, width), border = self.size, self.padding
        left, top = (int(torch.randint(-border, border + 1, ())) for _ in range(2))
        return image.crop((left, top, left + width, top + height))


class Grayscale:
    """Shades of grey."""

    def __call__(self, image: Pixels) -> Pixels:
        return image.convert("L")


class RandomHorizontalFlip:
    """Mirrors half of the images."""

    def __call__(self, image: Pixels) -> Pixels:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(1) < 0.5 else image


class RandomResizedCrop(Resize):
    """Resizes to a square; cuts nothing off."""

    def __init__(self, size: int) -> None:
        super().__init__((size, size))
