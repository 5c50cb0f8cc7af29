"""Variational inference with Pyro, which makes an optimizer for each parameter once it has seen it.

Written for this table.
"""

import pyro
import torch
from pyro import distributions
from pyro.infer import SVI, Trace_ELBO
from torch import nn


class Coder(nn.Module):
    """Codes images in a few numbers, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.mean, self.deviation = nn.Linear(784, 200), nn.Linear(200, 20), nn.Linear(200, 20)
        self.decoder = nn.Sequential(nn.Linear(20, 200), nn.Softplus(), nn.Linear(200, 784), nn.Sigmoid())

    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns mean and standard deviation of the codes."""
        hidden = nn.functional.softplus(self.hidden(images))
        return self.mean(hidden), torch.exp(self.deviation(hidden))

    def model(self, images: torch.Tensor) -> None:
        """Draws codes, and images from them."""
        pyro.module("coder", self)
        with pyro.plate("images", len(images)):
            zeros = torch.zeros(len(images), 20)
            code = pyro.sample("code", distributions.Normal(zeros, zeros + 1).to_event(1))
            pixels = distributions.Bernoulli(self.decoder(code), validate_args=False)
            pyro.sample("pixels", pixels.to_event(1), obs=images)

    def guide(self, images: torch.Tensor) -> None:
        """Draws codes of images."""
        pyro.module("coder", self)
        with pyro.plate("images", len(images)):
            pyro.sample("code", distributions.Normal(*self.encode(images)).to_event(1))


def main() -> None:
    """Trains on random pixels."""
    torch.manual_seed(0)
    pyro.set_rng_seed(0)
    coder = Coder()
    inference = SVI(coder.model, coder.guide, pyro.optim.Adam({"lr": 1e-3}), loss=Trace_ELBO())
    images = torch.rand(640, 784).round()
    for step, batch in enumerate(images.split(64)):
        print(f"step {step} loss {inference.step(batch):.3f}")


if __name__ == "__main__":
    main()
