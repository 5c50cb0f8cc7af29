"""Models of sequences, and gradients through gradients or of each sample, in plain torch: sequences.py NAME.

Written for this table.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence


class Reader(nn.Module):
    """An embedding, a bidirectional LSTM over packed sequences, attention over its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 64, padding_idx=0)
        self.lstm = nn.LSTM(64, 64, bidirectional=True, batch_first=True)
        self.score, self.output = nn.Linear(128, 1), nn.Linear(128, 4)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        scores = self.score(torch.tanh(hidden)).masked_fill((words == 0)[..., None], float("-inf"))
        return self.output((scores.softmax(1) * hidden).sum(1))


def batch_of(texts: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pads texts to the longest of them."""
    words = pad_sequence([text for text, _ in texts], batch_first=True)
    return words, torch.tensor([len(text) for text, _ in texts]), torch.tensor([label for _, label in texts])


def lengths() -> None:
    """Text classification on packed sequences of all lengths, sorted into buckets."""
    torch.manual_seed(0)
    lengths = torch.randint(8, 60, (144,)).tolist()
    texts = [(torch.randint(1, 2000, (length,)), length % 4) for length in lengths]
    loader = torch.utils.data.DataLoader(texts, batch_size=12, shuffle=True, collate_fn=batch_of)  # type: ignore[arg-type]
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step, (words, sizes, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words, sizes), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


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


def speech() -> None:
    """Speech: strided convolutions, a bidirectional GRU, CTC; padded batches of other lengths each time."""
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


CHANNELS, INNER, STATE, WORDS = 48, 96, 8, 128


class Mixer(nn.Module):
    """Mixes along time by a scan whose parameters depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(CHANNELS)
        self.entry, self.exit = nn.Linear(CHANNELS, 2 * INNER), nn.Linear(INNER, CHANNELS)
        self.convolution = nn.Conv1d(INNER, INNER, 4, padding=3, groups=INNER)
        self.selection, self.step = nn.Linear(INNER, 2 * STATE + 4), nn.Linear(4, INNER)
        self.decay = nn.Parameter(torch.log(torch.arange(1.0, STATE + 1)).repeat(INNER, 1))
        self.skip = nn.Parameter(torch.ones(INNER))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values, gate = self.entry(self.norm(tokens)).chunk(2, -1)
        values = F.silu(self.convolution(values.transpose(1, 2))[..., : tokens.shape[1]].transpose(1, 2))
        low, entering, leaving = self.selection(values).split((4, STATE, STATE), -1)
        step = F.softplus(self.step(low))
        kept = torch.exp(step[..., None] * -torch.exp(self.decay))
        added = (step * values)[..., None] * entering[:, :, None]
        state, outputs = torch.zeros_like(kept[:, 0]), []
        for time in range(tokens.shape[1]):
            state = kept[:, time] * state + added[:, time]
            outputs.append((state * leaving[:, time, None]).sum(-1))
        mixed = torch.stack(outputs, 1) + self.skip * values
        return tokens + self.exit(mixed * F.silu(gate))


class Scanner(nn.Module):
    """Words in, the next word out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, CHANNELS)
        self.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.norm = nn.RMSNorm(CHANNELS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        tokens = self.embedding(words)
        for layer in self.layers:
            tokens = layer(tokens)
        return F.linear(self.norm(tokens), self.embedding.weight)


def state_space() -> None:
    """A selective state-space model in plain torch: a scan over time, gates, a tied head."""
    torch.manual_seed(0)
    model = Scanner()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for step in range(9):
        words = torch.randint(0, WORDS, (4, 25))
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


RATE = 0.01


def meta() -> None:
    """Meta-learning by gradients through gradients on sine waves (MAML), in plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.001)
    for step in range(9):
        total = torch.zeros(())
        for _ in range(8):
            points, phase = torch.rand(40, 1) * 10 - 5, 3 * torch.rand(())
            values = torch.sin(points + phase)
            adapted = dict(model.named_parameters())
            for _ in range(3):
                loss = F.mse_loss(functional_call(model, adapted, (points[::2],)), values[::2])
                gradients = torch.autograd.grad(loss, tuple(adapted.values()), create_graph=True)
                pairs = zip(adapted.items(), gradients, strict=True)
                adapted = {name: value - RATE * gradient for (name, value), gradient in pairs}
            total = total + F.mse_loss(functional_call(model, adapted, (points[1::2],)), values[1::2]) / 8
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        print(f"step {step} loss {total.item():.6f}")


CLIP, NOISE = 1.0, 0.1


def per_sample() -> None:
    """Private training: gradients of each sample by vmap, clipped and noised."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(16 * 11 * 11, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_of(parameters: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, parameters, (image[None],)), label[None])

    gradients_of = vmap(grad(loss_of), in_dims=(None, 0, 0), randomness="different")
    data = torch.utils.data.TensorDataset(torch.rand(192, 1, 28, 28), torch.randint(0, 10, (192,)))
    for images, labels in torch.utils.data.DataLoader(data, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        each = gradients_of(parameters, images, labels)
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in each.values()]).norm(dim=0)
        scales = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        for name, parameter in model.named_parameters():
            total = torch.einsum("i,i...->...", scales, each[name])
            parameter.grad = (total + NOISE * torch.randn_like(total)) / len(images)
        optimizer.step()
        with torch.no_grad():
            print(f"loss {F.cross_entropy(model(images), labels).item():.6f}")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
