"""A classifier under Lightning's Trainer: weight averaging, clipping, validation, checkpoints.

Written for this table.
"""

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class Classifier(lightning.LightningModule):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()]
        self.layers = nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        loss = F.cross_entropy(self(batch[0]), batch[1])
        print(f"loss {loss.item():.6f}")
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        """Logs the loss of a batch."""
        self.log("validation", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> object:
        """Returns the optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


def main() -> None:
    """Trains for three epochs."""
    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 3, 24, 24), torch.randint(0, 4, (64,)))
    callbacks = [ModelCheckpoint("checkpoints", monitor="validation"), StochasticWeightAveraging(1e-2, 1)]
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=callbacks,
    )
    loaders = torch.utils.data.DataLoader(data, 16), torch.utils.data.DataLoader(data, 32)
    trainer.fit(Classifier(), *loaders)


if __name__ == "__main__":
    main()
