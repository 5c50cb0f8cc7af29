"""Two optimizers and a moving average of the weights: an encoder by SGD, a head by AdamW.

Written for this table.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Classifier(nn.Module):
    """A convolutional encoder and a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in ((3, 24), (24, 48), (48, 48)):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU(), nn.AvgPool2d(2)]
        self.encoder = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Sequential(nn.Linear(48 * 16, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(images))


def main() -> None:
    """Trains on random images, and validates the average on larger batches."""
    torch.manual_seed(0)
    model = Classifier()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizers = [
        torch.optim.SGD(model.encoder.parameters(), lr=0.05, momentum=0.9, nesterov=True),
        torch.optim.AdamW(model.head.parameters(), lr=1e-3),
    ]
    data = torch.utils.data.TensorDataset(torch.rand(128, 3, 32, 32), torch.randint(0, 10, (128,)))
    for epoch in range(2):
        model.train()
        for images, labels in torch.utils.data.DataLoader(data, batch_size=16, shuffle=True):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            average.update_parameters(model)
            print(f"epoch {epoch} loss {loss.item():.6f}")
        average.eval()
        with torch.no_grad():
            images, labels = data.tensors
            print(f"epoch {epoch} validation {F.cross_entropy(average(images), labels).item():.6f}")


if __name__ == "__main__":
    main()
