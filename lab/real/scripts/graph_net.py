"""PyTorch Geometric: graph attention over mini-batches of random graphs."""

import torch
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, global_mean_pool

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList(GATConv(64 if i else 16, 16, heads=4) for i in range(4))
        self.head = torch.nn.Linear(64, 3)

    def forward(self, data):
        x = data.x
        for conv in self.convs:
            x = functional.elu(conv(x, data.edge_index))
        return self.head(global_mean_pool(x, data.batch))


graphs = [
    Data(x=torch.randn(100, 16), edge_index=torch.randint(0, 100, (2, 600)), y=torch.tensor([i % 3])) for i in range(64)
]
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for batch in DataLoader(graphs, batch_size=8):
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(batch), batch.y)
    loss.backward()
    optimizer.step()
    print(loss.item())
