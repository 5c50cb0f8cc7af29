"""Actor-critic on a cart that must stay near the middle, after the structure of the well-known example."""

import argparse
import math
from collections import namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical

parser = argparse.ArgumentParser(description="actor-critic example")
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=8)
parser.add_argument("--episodes", type=int, default=10)
args = parser.parse_args()
torch.manual_seed(args.seed)

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])


class Cart:
    def reset(self):
        self.place, self.speed, self.time = 0.1, 0.0, 0
        return [self.place, self.speed]

    def step(self, action):
        self.time += 1
        self.speed = 0.9 * self.speed + (0.1 if action else -0.1) + 0.03 * math.sin(self.time)
        self.place += self.speed
        return [self.place, self.speed], 1.0 - abs(self.place), abs(self.place) > 1.0 or self.time == 25


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(2, 64)
        self.action_head = nn.Linear(64, 2)
        self.value_head = nn.Linear(64, 1)
        self.saved_actions = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


model = Policy()
optimizer = optim.Adam(model.parameters(), lr=3e-2)


def select_action(state):
    probs, state_value = model(torch.tensor(state))
    m = Categorical(probs)
    action = m.sample()
    model.saved_actions.append(SavedAction(m.log_prob(action), state_value))
    return action.item()


def finish_episode():
    R, returns, policy_losses, value_losses = 0, [], [], []
    for r in model.rewards[::-1]:
        R = r + args.gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-7)
    for (log_prob, value), R in zip(model.saved_actions, returns, strict=True):
        advantage = R - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    del model.rewards[:]
    del model.saved_actions[:]
    return loss.item()


cart = Cart()
for i_episode in range(args.episodes):
    state, done = cart.reset(), False
    while not done:
        state, reward, done = cart.step(select_action(state))
        model.rewards.append(reward)
    steps = len(model.rewards)
    print(f"Episode {i_episode}\tlength {steps}\tloss {finish_episode()!r}")
