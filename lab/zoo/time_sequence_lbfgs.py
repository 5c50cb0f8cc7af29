"""Sine waves with LSTM cells in double precision and LBFGS: forward and backward run inside step()."""

import torch
import torch.nn as nn
import torch.optim as optim


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 16)
        self.lstm2 = nn.LSTMCell(16, 16)
        self.linear = nn.Linear(16, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t, c_t, h_t2, c_t2 = (torch.zeros(input.size(0), 16, dtype=torch.double) for _ in range(4))
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


torch.manual_seed(10)
phases = torch.rand(12, 1, dtype=torch.double) * 20
data = torch.sin(torch.arange(25, dtype=torch.double) / 3 + phases)
input, target = data[3:, :-1], data[3:, 1:]
test_input, test_target = data[:3, :-1], data[:3, 1:]
seq = Sequence()
seq.double()
criterion = nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4)
for i in range(8):
    print("STEP:", i)

    def closure():
        optimizer.zero_grad()
        out = seq(input)
        loss = criterion(out, target)
        print("loss:", repr(loss.item()))
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        pred = seq(test_input, future=5)
        print("test loss:", repr(criterion(pred[:, :-5], test_target).item()))
