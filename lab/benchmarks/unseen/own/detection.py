"""A small detector: as many boxes an image as it has, anchors matched to them, images of several sizes.

Written for this table.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn


class Detector(nn.Module):
    """Scores and boxes at each place of a feature map."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 64)
        self.backbone = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
                for a, b in itertools.pairwise(widths)
            )
        )
        self.head = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
        self.scores, self.boxes = nn.Conv2d(64, 1, 1), nn.Conv2d(64, 4, 1)

    def forward(self, images: torch.Tensor, targets: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.head(self.backbone(images))
        scores, boxes = self.scores(features).flatten(1), self.boxes(features).flatten(2).transpose(1, 2)
        rows, columns = features.shape[-2:]
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        centres = torch.stack([x.flatten(), y.flatten()], 1).float() * 8 + 4
        score_loss, box_loss = scores.new_zeros(()), scores.new_zeros(())
        for number, target in enumerate(targets):
            middle = (target[:, :2] + target[:, 2:]) / 2
            nearest = torch.cdist(centres, middle).argmin(0)
            wanted = torch.zeros_like(scores[number]).index_fill(0, nearest, 1.0)
            score_loss = score_loss + F.binary_cross_entropy_with_logits(scores[number], wanted)
            found = scores[number].detach().sigmoid() > 0.5
            positive = torch.cat([found.nonzero()[:50, 0], nearest])
            offsets = target[torch.cdist(centres[positive], middle).argmin(1)] / 64
            box_loss = box_loss + F.smooth_l1_loss(boxes[number][positive], offsets)
        return score_loss / len(targets), box_loss / len(targets)


def main() -> None:
    """Trains on random images whose size and boxes change from batch to batch."""
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for step in range(14):
        height, width = (96, 128) if step % 3 else (128, 128)
        images = torch.rand(4, 3, height, width)
        targets = []
        for _ in images:
            corners = torch.rand(int(torch.randint(1, 9, ())), 2) * 64
            targets.append(torch.cat([corners, corners + 8 + 40 * torch.rand_like(corners)], 1))
        losses = model(images, targets)
        loss = sum(losses, torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
