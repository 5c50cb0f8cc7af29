"""REINFORCE on a corridor: episodes of differing length, so no two steps have the same operators."""

import torch
from torch import nn
from torch.distributions import Categorical

LENGTH = 8


class Corridor:
    """Walk right to the end; the wind sometimes pushes back."""

    def reset(self):
        self.position, self.time = 0, 0
        return self.observe()

    def observe(self):
        return torch.nn.functional.one_hot(torch.tensor(self.position), LENGTH).float()

    def step(self, action):
        self.time += 1
        move = 1 if action == 1 else -1
        if torch.rand(()).item() < 0.1:
            move = -move
        self.position = min(max(self.position + move, 0), LENGTH - 1)
        done = self.position == LENGTH - 1
        return self.observe(), 1.0 if done else -0.05, done or self.time >= 30


torch.manual_seed(7)
policy = nn.Sequential(nn.Linear(LENGTH, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 2), nn.Softmax(-1))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
environment = Corridor()
for episode in range(10):
    state, done, log_probabilities, rewards = environment.reset(), False, [], []
    while not done:
        choice = Categorical(policy(state))
        action = choice.sample()
        log_probabilities.append(choice.log_prob(action))
        state, reward, done = environment.step(action.item())
        rewards.append(reward)
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    loss = torch.stack([-log * value for log, value in zip(log_probabilities, returns, strict=True)]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(episode, len(rewards), repr(loss.item()))
