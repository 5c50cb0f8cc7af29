import sys

import torch
from torch.utils.data import DataLoader, Dataset
from training import make, step


class Numbers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if sys.argv[2] == "fails" and index == 17:
            raise ValueError(f"no item {index}")
        return torch.full((16,), index / 24) + torch.rand(16) * 1e-3


if __name__ == "__main__":
    model, optimizer = make()
    loader = DataLoader(
        Numbers(),
        batch_size=8,
        # With two, chance decides in which line of the loader the failure arrives.
        num_workers=1 if sys.argv[2] == "fails" else 2,
        shuffle=True,
        multiprocessing_context=sys.argv[1],
        persistent_workers=True,
    )
    for epoch in range(2):
        for batch in loader:
            print(epoch, step(model, optimizer, batch).hex(), flush=True)
