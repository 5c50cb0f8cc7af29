"""Models that are trained in particular ways, in the usual loop: techniques.py NAME [OPTION]."""

import copy
import functools
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from usual_loop import main


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant, width=64, layers=5):
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.layers = nn.ModuleList(FeedForward(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def activation_checkpointing(how="plain"):
    """Activation checkpointing with dropout inside, reentrant or not."""
    model = Checkpointed(use_reentrant=how == "reentrant")

    def loss_of(step):
        x, y = torch.randn(128, 16), torch.randint(4, (128,))
        return F.cross_entropy(model(x), y)

    return torch.optim.Adam(model.parameters(), lr=1e-3), loss_of


def selective_checkpointing():
    """Selective activation checkpointing: products are kept, everything else is computed again."""

    def policy(context, operator, *args, **kwargs):
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    layers = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48), nn.Tanh()) for _ in range(4)
    )
    head = nn.Linear(48, 1)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def loss_of(step):
        x = torch.randn(96, 48)
        target = x.sum(1, keepdim=True).sin()
        for layer in layers:
            x = x + checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return (head(x) - target).pow(2).mean()

    return torch.optim.SGD([*layers.parameters(), *head.parameters()], lr=0.01, momentum=0.9), loss_of


def autocast_bf16():
    """Mixed precision on CPU: autocast to bfloat16, no gradient scaler."""
    features = [nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*features, nn.Linear(8 * 196, 64), nn.ReLU(), nn.Linear(64, 10))

    def loss_of(step):
        images, labels = torch.randn(16, 1, 28, 28), torch.randint(10, (16,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(images), labels)

    return torch.optim.AdamW(model.parameters(), lr=1e-3), loss_of


def compiled(backend="inductor"):
    """A tiny model under torch.compile."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    called = torch.compile(model, backend=backend)

    def loss_of(step):
        x, y = torch.randn(64, 16), torch.randint(4, (64,))
        return F.cross_entropy(called(x), y)

    def counts(step):
        counters = torch._dynamo.utils.counters
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    return torch.optim.SGD(model.parameters(), lr=0.1), loss_of, counts


class ExpSquared(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.exp(-x * x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return -2 * gradient * x * y


class Drop(Function):
    @staticmethod
    def forward(ctx, x, rate):
        ctx.mask = (torch.rand_like(x) > rate).to(x.dtype) / (1 - rate)
        return x * ctx.mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.mask, None


class Round(Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1, 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x):
        hidden = Drop.apply(ExpSquared.apply(self.first(x)), 0.2)
        return F.linear(hidden, Round.apply(self.second.weight), self.second.bias)


def custom_function():
    """Custom autograd.Functions: one saves its output, one keeps a tensor on ctx, one rounds straight through."""
    net = Net()

    def loss_of(step):
        x = torch.randn(64, 16)
        return F.smooth_l1_loss(net(x), x[:, :4].cos())

    return torch.optim.NAdam(net.parameters(), lr=5e-3), loss_of


class LowRank(nn.Module):
    def __init__(self, inner, rank=2):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inner.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x):
        return self.inner(x) + x @ self.down.t() @ self.up.t()


def finetune():
    """Fine-tuning: a frozen trunk in no_grad, low-rank adapters trained, weights loaded first and saved at the end."""
    trunk = nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
    weights = io.BytesIO()
    torch.save(trunk.state_dict(), weights)
    weights.seek(0)
    trunk.load_state_dict(torch.load(weights, weights_only=True))
    trunk.eval()
    head = nn.Sequential(LowRank(nn.Linear(96, 48)), nn.ReLU(), LowRank(nn.Linear(48, 2)))
    optimizer = torch.optim.AdamW([parameter for parameter in head.parameters() if parameter.requires_grad], lr=1e-2)

    def loss_of(step):
        x = torch.randn(64, 24)
        with torch.no_grad():
            features = trunk(x)
        return F.cross_entropy(head(features), (x[:, 0] > x[:, 1]).long())

    def save(step):
        if step < 9:
            return ()
        saved = io.BytesIO()
        torch.save({"head": head.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        return (len(torch.load(io.BytesIO(saved.getvalue()), weights_only=True)["optimizer"]["state"]),)

    return optimizer, loss_of, save


def gradient_penalty():
    """Double backward: a critic whose loss holds the norm of its own gradient (create_graph)."""
    convolutions = [nn.Conv2d(1, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.SiLU()]
    critic = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * 49, 1))

    def loss_of(step):
        real, fake, mix = torch.rand(16, 1, 28, 28), torch.randn(16, 1, 28, 28), torch.rand(16, 1, 1, 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_(True)
        (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (gradient.flatten(1).norm(2, dim=1) - 1).pow(2).mean()
        return critic(fake).mean() - critic(real).mean() + 10 * penalty

    return torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9)), loss_of


def optimizer_variants(kind="loop"):
    """One model under a fused, a foreach or a plain-loop optimizer with weight decay and parameter groups."""
    flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}[kind]
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]

    def loss_of(step):
        x = torch.randn(4, 64)
        return (model(x) - x.mean(1, keepdim=True)).abs().sum()

    return torch.optim.AdamW(groups, lr=1e-3, **flags), loss_of


def parametrized_weights():
    """Spectral and weight norm as parametrizations, weights frozen halfway, a parameter added to the optimizer late."""
    body = nn.Sequential(spectral_norm(nn.Linear(16, 32)), nn.ReLU(), weight_norm(nn.Linear(32, 32)), nn.ReLU())
    head, scale = nn.Linear(32, 3), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05, momentum=0.9)

    def loss_of(step):
        if step == 4:
            optimizer.add_param_group({"params": [scale]})
        if step == 6:
            body[0].requires_grad_(False)
        x = torch.randn(32, 16)
        return F.cross_entropy(head(body(x)) * scale, x[:, :3].argmax(1))

    return optimizer, loss_of


def weight_averages():
    """Moving averages of the weights in copies of the model, one by hand and one by torch's AveragedModel."""
    layers = [nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 3)]
    model = nn.Sequential(*layers)
    shadow = copy.deepcopy(model).eval().requires_grad_(False)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

    def loss_of(step):
        x = torch.randn(50, 20)
        return F.cross_entropy(model(x), (x[:, 0] > 0).long() + (x[:, 1] > 0).long())

    @torch.no_grad()
    def update(step, decay=0.95):
        for old, new in zip(shadow.parameters(), model.parameters(), strict=True):
            old.mul_(decay).add_(new, alpha=1 - decay)
        for old, new in zip(shadow.buffers(), model.buffers(), strict=True):
            old.copy_(new)
        averaged.update_parameters(model)
        x = torch.randn(50, 20)
        return (repr((shadow(x) - averaged(x)).abs().mean().item()),)

    return torch.optim.Adam(model.parameters(), lr=1e-2), loss_of, update


if __name__ == "__main__":
    main(globals())
