"""An exact Gaussian process of GPyTorch, whose modules torch sees no call of.

Written for this table.
"""

import gpytorch
import torch


class Process(gpytorch.models.ExactGP):
    """A scaled radial kernel with a length for each input."""

    def __init__(self, points: torch.Tensor, values: torch.Tensor, likelihood: gpytorch.likelihoods.Likelihood) -> None:
        super().__init__(points, values, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))

    def forward(self, points: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(points), self.covar_module(points))


def main() -> None:
    """Fits the kernel to noisy values."""
    torch.manual_seed(0)
    points = torch.rand(300, 2)
    values = torch.sin(6 * points[:, 0]) + 0.1 * torch.randn(300)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Process(points, values, likelihood)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    for step in range(12):
        optimizer.zero_grad()
        loss = -marginal(model(points), values)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
