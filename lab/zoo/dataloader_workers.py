"""Two DataLoader worker processes with augmentation that draws random numbers in the worker."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Noisy(Dataset):
    def __init__(self, count):
        self.values = torch.randn(count, 3, 16, 16)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        assert get_worker_info() is not None
        image = self.values[index]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return {"image": image + 0.1 * torch.randn_like(image), "label": index % 5}


def main():
    torch.manual_seed(15)
    loader = DataLoader(Noisy(60), batch_size=12, shuffle=True, num_workers=2, persistent_workers=False)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(392, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(epoch, repr(loss.item()))


if __name__ == "__main__":
    main()
