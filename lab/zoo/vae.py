"""Variational autoencoder on synthetic digits, after the structure of the well-known example."""

import argparse

import torch
import torch.utils.data
from torch import nn, optim
from torch.nn import functional as F

parser = argparse.ArgumentParser(description="VAE example")
parser.add_argument("--batch-size", type=int, default=32, metavar="N")
parser.add_argument("--epochs", type=int, default=2, metavar="N")
parser.add_argument("--seed", type=int, default=21, metavar="S")
parser.add_argument("--log-interval", type=int, default=1, metavar="N")
args = parser.parse_args()
torch.manual_seed(args.seed)
device = torch.device("cpu")


def blobs(count):
    grid = torch.linspace(-1, 1, 20)
    centres = torch.rand(count, 2, 1, 1) - 0.5
    distance = (grid[None, :, None] - centres[:, 0]) ** 2 + (grid[None, None, :] - centres[:, 1]) ** 2
    return torch.exp(-20 * distance).unsqueeze(1)


train_loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(blobs(160)), batch_size=args.batch_size, shuffle=True
)
test_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(blobs(64)), batch_size=args.batch_size)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(400, 128)
        self.fc21 = nn.Linear(128, 6)
        self.fc22 = nn.Linear(128, 6)
        self.fc3 = nn.Linear(6, 128)
        self.fc4 = nn.Linear(128, 400)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 400))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 400), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data,) in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_loader.dataset)}]\tLoss: {loss.item()!r}")
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset)!r}")


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for (data,) in test_loader:
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
    print(f"====> Test set loss: {test_loss / len(test_loader.dataset)!r}")


if __name__ == "__main__":
    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test(epoch)
        with torch.no_grad():
            sample = model.decode(torch.randn(16, 6))
            print(repr(sample.mean().item()))
