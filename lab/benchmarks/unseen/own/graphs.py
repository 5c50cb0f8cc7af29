"""Graph classification with torch_geometric: graphs of all sizes in a batch.

Written for this table.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool


class Network(nn.Module):
    """Three isomorphism layers and a sum over each graph."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((16, 64), (64, 64), (64, 64))
        self.layers = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Linear(b, b))) for a, b in sizes
        )
        self.output = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 3))

    def forward(self, graphs: Data) -> torch.Tensor:
        nodes = graphs.x
        for layer in self.layers:
            nodes = layer(nodes, graphs.edge_index).relu()
        return self.output(global_add_pool(nodes, graphs.batch))


def graph_of(number: int) -> Data:
    """Returns a random graph."""
    generator = torch.Generator().manual_seed(number)
    nodes = int(torch.randint(10, 40, (), generator=generator))
    edges = torch.randint(0, nodes, (2, 4 * nodes), generator=generator)
    return Data(x=torch.rand(nodes, 16, generator=generator), edge_index=edges, y=torch.tensor([number % 3]))


def main() -> None:
    """Trains on random graphs."""
    torch.manual_seed(0)
    loader = DataLoader([graph_of(number) for number in range(160)], batch_size=16, shuffle=True)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step, graphs in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(graphs), graphs.y)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
