"""Speech: strided convolutions, a bidirectional GRU, CTC; padded batches of other lengths each time.

Written for this table.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

CHARACTERS = 29


class Recognizer(nn.Module):
    """Log-probabilities of characters, one frame in four."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, 5, 2, 2), nn.Hardtanh(0, 20), nn.Conv2d(16, 16, 5, 2, 2), nn.Hardtanh(0, 20)
        )
        self.recurrent = nn.GRU(16 * 10, 64, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.output = nn.Linear(128, CHARACTERS)

    def forward(self, spectra: torch.Tensor) -> torch.Tensor:
        features = self.convolutions(spectra[:, None])
        features = features.permute(0, 3, 1, 2).flatten(2)
        return F.log_softmax(self.output(self.recurrent(features)[0]), -1)


def main() -> None:
    """Trains on noise."""
    torch.manual_seed(0)
    model = Recognizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(12):
        frames = torch.randint(60, 120, (6,))
        spectra = pad_sequence([torch.randn(int(n), 40) for n in frames], batch_first=True).transpose(1, 2)
        words = torch.randint(3, 10, (6,))
        text = torch.randint(1, CHARACTERS, (int(words.sum()),))
        found = model(spectra).transpose(0, 1)
        loss = F.ctc_loss(found, text, (frames + 3) // 4, words, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
