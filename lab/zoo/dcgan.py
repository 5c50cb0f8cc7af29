"""DCGAN: generator and discriminator with an optimizer each, after the structure of the well-known example."""

import argparse
import random

import torch
import torch.nn as nn
import torch.optim as optim

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=16)
parser.add_argument("--imageSize", type=int, default=32)
parser.add_argument("--nz", type=int, default=24, help="size of the latent z vector")
parser.add_argument("--ngf", type=int, default=16)
parser.add_argument("--ndf", type=int, default=16)
parser.add_argument("--niter", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.0002)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--manualSeed", type=int, default=4)
opt = parser.parse_args()
random.seed(opt.manualSeed)
torch.manual_seed(opt.manualSeed)


def images(count):
    squares = torch.full((count, 3, opt.imageSize, opt.imageSize), -1.0)
    for image in squares:
        top, left, side = (random.randrange(low, 20) for low in (0, 0, 6))
        image[:, top : top + side, left : left + side] = random.random()
    return squares


dataset = torch.utils.data.TensorDataset(images(6 * opt.batchSize))
dataloader = torch.utils.data.DataLoader(dataset, batch_size=opt.batchSize, shuffle=True, num_workers=0)
device = torch.device("cpu")


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        layers, channels = [], (opt.nz, opt.ngf * 4, opt.ngf * 2, opt.ngf)
        for index, (before, after) in enumerate(zip(channels, channels[1:], strict=False)):
            stride, padding = (1, 0) if index == 0 else (2, 1)
            layers += [nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False)]
            layers += [nn.BatchNorm2d(after), nn.ReLU(True)]
        self.main = nn.Sequential(*layers, nn.ConvTranspose2d(opt.ngf, 3, 4, 2, 1, bias=False), nn.Tanh())

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, opt.ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(opt.ndf, opt.ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(opt.ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(opt.ndf * 2, opt.ndf * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(opt.ndf * 4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(opt.ndf * 4, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, image):
        return self.main(image).view(-1, 1).squeeze(1)


netG = Generator().to(device)
netG.apply(weights_init)
netD = Discriminator().to(device)
netD.apply(weights_init)
criterion = nn.BCELoss()
real_label, fake_label = 1.0, 0.0
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

for epoch in range(opt.niter):
    for i, (real,) in enumerate(dataloader, 0):
        netD.zero_grad()
        label = torch.full((real.size(0),), real_label, dtype=real.dtype, device=device)
        output = netD(real)
        errD_real = criterion(output, label)
        errD_real.backward()

        noise = torch.randn(real.size(0), opt.nz, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()
        print(f"[{epoch}][{i}/{len(dataloader)}] Loss_D: {errD.item()!r} Loss_G: {errG.item()!r}")
