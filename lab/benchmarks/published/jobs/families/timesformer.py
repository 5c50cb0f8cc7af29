"""TimeSformer as MMAction2 writes it: a ViT-B/16 whose layers attend over time, space or both."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, HEADS, DEPTH, FRAMES, PATCHES = 768, 12, 12, 8, 196


class DropPath(nn.Module):
    """Leaves samples out of a residual branch at random."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.probability == 0 or not self.training:
            return x
        kept = 1 - self.probability
        mask = kept + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
        return x.div(kept) * mask.floor()


class Attention(nn.Module):
    """Attention of torch over tokens [sample, token, feature], after which samples are dropped."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)
        self.drop = DropPath(drop)

    def attend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the attention's output for tokens that are normed first."""
        x = self.norm(tokens).permute(1, 0, 2)
        x = self.attention(x, x, x)[0].permute(1, 0, 2)
        return self.drop(x.contiguous())


class TimeAttention(Attention):
    """Attends over the frames of each patch."""

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.temporal_fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        token = query[:, 0, :].unsqueeze(1)
        identity = patches = query[:, 1:, :]
        count = len(query)
        over_time = self.attend(patches.reshape(count * PATCHES, FRAMES, WIDTH))
        over_time = self.temporal_fc(over_time).reshape(count, PATCHES * FRAMES, WIDTH)
        return torch.cat((token, identity + over_time), 1)


class SpaceAttention(Attention):
    """Attends over the patches of each frame, and a token for each frame."""

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        identity, count = query, len(query)
        token = query[:, 0, :].unsqueeze(1)
        patches = query[:, 1:, :]
        token = token.repeat(1, FRAMES, 1).reshape(count * FRAMES, WIDTH).unsqueeze(1)
        patches = patches.reshape(count, PATCHES, FRAMES, WIDTH).transpose(1, 2).reshape(-1, PATCHES, WIDTH)
        over_space = self.attend(torch.cat((token, patches), 1))
        token = torch.mean(over_space[:, 0, :].reshape(count, FRAMES, WIDTH), 1, True)
        patches = over_space[:, 1:, :].reshape(count, FRAMES, PATCHES, WIDTH).transpose(1, 2)
        return identity + torch.cat((token, patches.reshape(count, -1, WIDTH)), 1)


class WholeAttention(Attention):
    """Attends over all tokens of a sample."""

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return query + self.attend(query)


class FeedForward(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.drop = DropPath(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.layers(self.norm(x)))


class TimeSformer(nn.Module):
    """A classifier of clips [sample, channel, frame, y, x].

    Args:
        kind: Of attention: `divided`, `joint` or `space`.
        classes: To tell apart.
    """

    def __init__(self, kind: str, classes: int = 400) -> None:
        super().__init__()
        self.kind = kind
        self.projection = nn.Conv2d(3, WIDTH, 16, stride=16)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, PATCHES + 1, WIDTH))
        if kind != "space":
            self.time_embed = nn.Parameter(torch.zeros(1, FRAMES, WIDTH))
        layers: list[nn.Module] = []
        for index in range(DEPTH):
            drop = 0.1 * index / (DEPTH - 1)
            parts = [TimeAttention(drop), SpaceAttention(drop)] if kind == "divided" else [WholeAttention(drop)]
            layers += [*parts, FeedForward(drop)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        count = len(clips)
        x = clips.transpose(1, 2).reshape(-1, *clips.shape[1:2], *clips.shape[3:])
        x = self.projection(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.size(0), -1, -1), x), dim=1)
        x = x + self.pos_embed
        if self.kind != "space":
            tokens = x[:count, 0, :].unsqueeze(1)
            x = x[:, 1:, :].reshape(count, FRAMES, PATCHES, WIDTH).transpose(1, 2).reshape(-1, FRAMES, WIDTH)
            x = x + self.time_embed
            x = torch.cat((tokens, x.reshape(count, -1, WIDTH)), dim=1)
        x = self.layers(x)
        if self.kind == "space":
            x = torch.mean(x.view(-1, FRAMES, *x.size()[-2:]), 1)
        return self.head(self.norm(x)[:, 0])
