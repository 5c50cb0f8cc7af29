"""Lightning: a module with automatic optimization, logging, clipped gradients and validation."""

import os

import lightning as L
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(6))
        )
        self.head = nn.Linear(128, 10)

    def forward(self, rows):
        return self.head(self.blocks(rows))

    def training_step(self, batch, number):
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        self.log("validation", functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = TensorDataset(torch.randn(8 * 1024, 128), torch.randint(0, 10, (8 * 1024,)))
trainer = L.Trainer(
    max_epochs=1,
    accelerator="gpu" if "ON_GPU" in os.environ else "cpu",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Net(), DataLoader(data, batch_size=1024), DataLoader(data, batch_size=4096))
