"""Small U-Net with skip connections and two losses, each with a backward of its own (retain_graph)."""

import torch
from torch import nn


def double_conv(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.InstanceNorm2d(outputs, affine=True),
        nn.LeakyReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.InstanceNorm2d(outputs, affine=True),
        nn.LeakyReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, widths=(8, 16, 32)):
        super().__init__()
        self.down = nn.ModuleList(double_conv(a, b) for a, b in zip((1, *widths), widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths, widths[1:], strict=False))
        self.merge = nn.ModuleList(double_conv(2 * a, a) for a in widths[:-1])
        self.mask, self.edge = nn.Conv2d(widths[0], 1, 1), nn.Conv2d(widths[0], 1, 1)

    def forward(self, x):
        skips = []
        for index, layer in enumerate(self.down):
            x = layer(x if index == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for index in reversed(range(len(self.up))):
            x = self.merge[index](torch.cat([skips[index], self.up[index](x)], 1))
        return self.mask(x), self.edge(x)


torch.manual_seed(33)
model = UNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
for step in range(10):
    image = torch.rand(4, 1, 32, 32)
    mask, edge = model(image)
    mask_loss = nn.functional.binary_cross_entropy_with_logits(mask, (image > 0.5).float())
    edge_loss = nn.functional.mse_loss(edge, image.diff(dim=-1, prepend=image[..., :1]))
    optimizer.zero_grad()
    mask_loss.backward(retain_graph=True)
    edge_loss.backward()
    optimizer.step()
    print(step, repr(mask_loss.item()), repr(edge_loss.item()))
