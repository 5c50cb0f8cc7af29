"""Makes random data for the jobs of jobs.toml.

python make_data.py text|characters|images|waves FOLDER [COUNT] [SIZE]
"""

from __future__ import annotations

import argparse
import array
import pickle
import random
from pathlib import Path

WORDS, CHARACTERS = 1000, 65


def make_text(folder: Path, count: int) -> None:
    """Writes files of random words, as word_language_model reads them: ``count`` words to train on."""
    for name, words in (("train", count), ("valid", count // 8), ("test", count // 8)):
        draw = random.Random(name)
        lines = (" ".join(f"w{draw.randrange(WORDS)}" for _ in range(20)) for _ in range(words // 20))
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_characters(folder: Path, count: int) -> None:
    """Writes files of random characters' numbers, as nanoGPT reads them."""
    for name in ("train", "val"):
        draw = random.Random(name)
        numbers = array.array("H", (draw.randrange(CHARACTERS) for _ in range(count)))
        (folder / f"{name}.bin").write_bytes(numbers.tobytes())
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": CHARACTERS}))


def make_images(folder: Path, count: int, size: int) -> None:
    """Writes square images of random pixels."""
    from PIL import Image

    draw = random.Random(0)
    for number in range(count):
        pixels = draw.randbytes(3 * size * size)
        Image.frombytes("RGB", (size, size), pixels).save(folder / f"{number:03}.png")


def make_waves(folder: Path, count: int, size: int) -> None:
    """Writes sines of random phases, as time_sequence_prediction reads them."""
    import torch

    phases = torch.rand(count, 1, generator=torch.Generator().manual_seed(0)) * 100
    torch.save(torch.sin((torch.arange(size) + phases) / 20).double().numpy(), folder / "traindata.pt")


def main() -> None:
    """Makes the data asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("text", "characters", "images", "waves"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("count", type=int, nargs="?", default=8000)
    parser.add_argument("size", type=int, nargs="?", default=64)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.kind == "text":
        make_text(arguments.folder, arguments.count)
    elif arguments.kind == "characters":
        make_characters(arguments.folder, arguments.count)
    elif arguments.kind == "waves":
        make_waves(arguments.folder, arguments.count, arguments.size)
    else:
        make_images(arguments.folder, arguments.count, arguments.size)


if __name__ == "__main__":
    main()
