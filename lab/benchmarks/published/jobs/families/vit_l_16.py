"""ViT-L/16 as torchvision writes it, and the two published loops that train it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from families.setting import DEVICE, STEPS, expect_parameters
from torch import nn

IMAGE, PATCH, WIDTH, HEADS, LAYERS, MLP = 224, 16, 1024, 16, 24, 4096
# torchvision's documentation of vit_l_16, for 1,000 classes.
PARAMETERS = 304_326_632
LayerNorm = partial(nn.LayerNorm, eps=1e-6)


class EncoderLayer(nn.Module):
    """Attention and MLP, each after its norm; dropout is 0, as torchvision's default."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.0, batch_first=True)
        self.norm_mlp = LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, MLP), nn.GELU(), nn.Dropout(0.0), nn.Linear(MLP, WIDTH), nn.Dropout(0.0)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed = self.norm_attention(tokens)
        attended, _ = self.attention(normed, normed, normed, need_weights=False)
        attended = attended + tokens
        return attended + self.mlp(self.norm_mlp(attended))


class VisionTransformer(nn.Module):
    """Patches by a convolution, a class token, learned positions, 24 layers, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.empty(1, (IMAGE // PATCH) ** 2 + 1, WIDTH).normal_(std=0.02))
        self.layers = nn.Sequential(*(EncoderLayer() for _ in range(LAYERS)))
        self.norm = LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        batch = images.shape[0]
        tokens = self.patches(images).reshape(batch, WIDTH, -1).permute(0, 2, 1)
        tokens = torch.cat([self.class_token.expand(batch, -1, -1), tokens], dim=1)
        tokens = self.norm(self.layers(tokens + self.positions))
        return self.head(tokens[:, 0])


def make_model() -> VisionTransformer:
    """Returns the model of 1,000 classes on the CPU, its parameters counted."""
    model = VisionTransformer()
    expect_parameters(model, PARAMETERS)
    return model


def finetune(batch: int, precision: str, accumulate: int = 1) -> None:
    """Fine-tunes for ten classes with Adam as the Lightning article does.

    Args:
        batch: images of one forward and backward.
        precision: 32-true, 16-mixed or bf16-true, Fabric's words. Fabric runs the model in the precision and hands its
            output back in float32, so the loss is outside.
        accumulate: backwards before a step of the optimizer.
    """
    torch.set_float32_matmul_precision("highest" if precision == "32-true" else "high")
    model = make_model()
    model.head = nn.Linear(WIDTH, 10)
    if precision == "bf16-true":
        model.to(torch.bfloat16)
    model.to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
    scaler = torch.amp.GradScaler("cuda") if precision == "16-mixed" else None
    for index in range(STEPS * accumulate):
        features = torch.rand(batch, 3, IMAGE, IMAGE).to(DEVICE)
        targets = torch.randint(0, 10, (batch,)).to(DEVICE)
        with torch.autocast("cuda", torch.float16) if precision == "16-mixed" else nullcontext():
            logits = model(features.to(torch.bfloat16) if precision == "bf16-true" else features)
        logits = logits.float()
        loss = F.cross_entropy(logits, targets)
        if accumulate == 1:
            # Between forward and backward: the last step's gradients are there during the forward.
            optimizer.zero_grad()
        else:
            loss = loss / accumulate
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
        if index % accumulate == 0:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if accumulate > 1:
                optimizer.zero_grad()


def follow_tutorial() -> None:
    """Trains on one image with Adam, as PyTorch's tutorial does first: gradients are freed after the update."""
    model = make_model().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        tutorial_step(model)
        optimizer.step()
        optimizer.zero_grad()


def follow_tutorial_fused() -> None:
    """Trains with an Adam for each parameter, stepped in the backward: a gradient is freed as soon as it is used."""
    model = make_model().to(DEVICE)
    optimizers = {parameter: torch.optim.Adam([parameter], foreach=False) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        tutorial_step(model)


def tutorial_step(model: nn.Module) -> None:
    """Forward and backward of one image, the loss the sum of the outputs, as in PyTorch's tutorial."""
    image = torch.rand(1, 3, IMAGE, IMAGE).to(DEVICE)
    model(image).sum().backward()
