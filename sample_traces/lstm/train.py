"""Trains a small LSTM language model on words, with truncated backpropagation through time."""

from __future__ import annotations

import argparse
import random

import torch
from torch import nn
from torch.nn import functional as F

WORDS = (
    "a all and as at back before boat by came cold day down each far first for from gone great had hand "
    "he her his home how in into is it land last left light like long looked man many more morning moved "
    "much never new night no not now of off old on one other out over said saw sea see ship she sky so some "
    "still sun than that the their them then there they this through time to two under up us was water we "
    "went were what when where which while wind with would you"
).split()

State = tuple[torch.Tensor, torch.Tensor]


def make_corpus(length: int, seed: int) -> list[int]:
    """Draws words so that each one is mostly followed by one of four others: something there is to learn."""
    draw = random.Random(seed)
    followers = [draw.sample(range(len(WORDS)), 4) for _ in WORDS]
    corpus = [0]
    while len(corpus) < length:
        corpus.append(draw.choice(followers[corpus[-1]]) if draw.random() < 0.9 else draw.randrange(len(WORDS)))
    return corpus


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout)
        self.predict = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        hidden, state = self.lstm(self.dropout(self.embed(ids)), state)
        return self.predict(self.dropout(hidden)), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--length", type=int, default=35, help="words before the state is cut from its past")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-final", metavar="PATH", help="save the final parameters here")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    corpus = torch.tensor(make_corpus(args.batch_size * (args.length * args.steps + 1), args.seed))
    columns = corpus.view(args.batch_size, -1).t().contiguous()

    model = LanguageModel(len(WORDS), args.width, args.layers, args.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)

    model.train()
    state = None
    for step in range(args.steps):
        start = step * args.length
        inputs = columns[start : start + args.length]
        targets = columns[start + 1 : start + 1 + args.length]
        if state is not None:
            state = (state[0].detach(), state[1].detach())

        optimizer.zero_grad()
        logits, state = model(inputs, state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)

    if args.save_final:
        torch.save(model.state_dict(), args.save_final)


if __name__ == "__main__":
    main()
