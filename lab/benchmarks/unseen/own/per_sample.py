"""Private training: gradients of each sample by vmap, clipped and noised.

Written for this table.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

CLIP, NOISE = 1.0, 0.1


def main() -> None:
    """Trains a small convolutional network on random images."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(16 * 11 * 11, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_of(parameters: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, parameters, (image[None],)), label[None])

    gradients_of = vmap(grad(loss_of), in_dims=(None, 0, 0), randomness="different")
    data = torch.utils.data.TensorDataset(torch.rand(192, 1, 28, 28), torch.randint(0, 10, (192,)))
    for images, labels in torch.utils.data.DataLoader(data, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        each = gradients_of(parameters, images, labels)
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in each.values()]).norm(dim=0)
        scales = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        for name, parameter in model.named_parameters():
            total = torch.einsum("i,i...->...", scales, each[name])
            parameter.grad = (total + NOISE * torch.randn_like(total)) / len(images)
        optimizer.step()
        with torch.no_grad():
            print(f"loss {F.cross_entropy(model(images), labels).item():.6f}")


if __name__ == "__main__":
    main()
