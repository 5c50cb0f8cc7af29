"""Convolutional classifier with argparse, loaders and a test loop, after the structure of the MNIST example."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, 1)
        self.conv2 = nn.Conv2d(16, 32, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(4608, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_loader.dataset)}]\tLoss: {loss.item()!r}")
            if args.dry_run:
                break


def test(model, device, test_loader):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device))
            test_loss += F.nll_loss(output, target.to(device), reduction="sum").item()
            correct += output.argmax(dim=1, keepdim=True).eq(target.view(-1, 1)).sum().item()
    print(f"\nTest set: Average loss: {test_loss / len(test_loader.dataset)!r}, Accuracy: {correct}\n")


class Shapes(torch.utils.data.Dataset):
    """Ten kinds of bars in place of handwritten digits."""

    def __init__(self, count, transform=None):
        self.count, self.transform = count, transform

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        label = index % 10
        image = torch.zeros(1, 28, 28)
        image[:, 2 * label : 2 * label + 8, 4:24] = 1.0
        return (self.transform(image) if self.transform else image), label


def main():
    parser = argparse.ArgumentParser(description="MNIST-like example")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--test-batch-size", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--seed", type=int, default=30)
    parser.add_argument("--log-interval", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")

    def noisy(image):
        return (image + 0.3 * torch.randn_like(image) - 0.1307) / 0.3081

    train_loader = torch.utils.data.DataLoader(Shapes(96, noisy), batch_size=args.batch_size, shuffle=True)
    test_loader = torch.utils.data.DataLoader(Shapes(80), batch_size=args.test_batch_size)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()
