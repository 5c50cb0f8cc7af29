"""Models that people train, at the sizes they train them, with random weights and data: NAME [--steps N]."""

from __future__ import annotations

import argparse
import contextlib

import torch
from torch import nn
from torch.nn import functional as F

JOBS = {}


class Job:
    """A model, its batch, and how it is trained.

    ``loss_of(model, batch)`` is called under autocast to ``dtype`` where one is given.
    """

    def __init__(self, model, batch, loss_of, *, optimizer="adamw", dtype=None, clip=False, parameters=None):
        self.model = model
        self.batch = batch
        self.loss_of = loss_of
        self.optimizer = optimizer
        self.dtype = dtype
        self.clip = clip
        self.parameters = parameters or [p for p in model.parameters() if p.requires_grad]


def job(make):
    JOBS[make.__name__] = make
    return make


def own_loss(model, batch):
    return model(**batch).loss


def classified(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def tokens(vocabulary, *shape):
    return torch.randint(vocabulary, shape)


def images(count, side, classes=1000):
    return {"x": torch.randn(count, 3, side, side), "y": torch.randint(classes, (count,))}


def causal(config_class, count, length, dtype=torch.bfloat16, **settings):
    from transformers import AutoModelForCausalLM

    config = config_class(**settings)
    model = AutoModelForCausalLM.from_config(config)
    ids = tokens(config.vocab_size, count, length)
    return Job(model, {"input_ids": ids, "labels": ids}, own_loss, dtype=dtype, clip=True)


@job
def gpt2():
    from transformers import GPT2Config

    return causal(GPT2Config, 8, 1024)


def small_llama(**changes):
    from transformers import LlamaConfig

    settings = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    return LlamaConfig(**{**settings, **changes})


def llama_of(**changes):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_llama(**changes), dtype=torch.bfloat16)
    return model.to_empty(device="cuda")


@job
def llama_lora():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama_of(), LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    ids = tokens(128256, 2, 1024)
    return Job(model, {"input_ids": ids, "labels": ids}, own_loss)


@job
def llama_checkpointed():
    model = llama_of()
    model.gradient_checkpointing_enable()
    ids = tokens(128256, 2, 2048)
    return Job(model, {"input_ids": ids, "labels": ids}, own_loss, clip=True)


@job
def mixture():
    from transformers import MixtralConfig

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}
    return causal(MixtralConfig, 4, 512, num_key_value_heads=4, num_local_experts=8, vocab_size=32000, **sizes)


@job
def qwen3():
    from transformers import Qwen3Config

    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16}
    return causal(Qwen3Config, 4, 1024, num_key_value_heads=8, vocab_size=151936, **sizes)


@job
def bert():
    from transformers import BertConfig, BertForMaskedLM

    ids = tokens(30522, 16, 512)
    return Job(BertForMaskedLM(BertConfig()), {"input_ids": ids, "labels": ids}, own_loss, dtype=torch.float16)


@job
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0))
    return Job(model, {"input_ids": tokens(32128, 8, 512), "labels": tokens(32128, 8, 128)}, own_loss, clip=True)


@job
def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8
    )
    batch = {"input_features": torch.randn(4, 80, 3000), "labels": tokens(config.vocab_size, 4, 128)}
    return Job(WhisperForConditionalGeneration(config), batch, own_loss, dtype=torch.bfloat16)


@job
def wav2vec2():
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    model = Wav2Vec2ForCTC(Wav2Vec2Config(mask_time_prob=0.0, layerdrop=0.0))
    return Job(model, {"input_values": torch.randn(4, 80000), "labels": tokens(31, 4, 40) + 1}, own_loss)


@job
def mamba():
    from transformers import MambaConfig

    return causal(MambaConfig, 2, 128, dtype=None, hidden_size=512, num_hidden_layers=4, vocab_size=50280)


def of_timm(name, batch, **settings):
    import timm

    return Job(timm.create_model(name), batch, classified, **settings)


@job
def timm_vit():
    return of_timm("vit_base_patch16_224", images(64, 224), dtype=torch.bfloat16)


@job
def timm_resnet50():
    found = of_timm("resnet50", images(64, 224), dtype=torch.float16, optimizer="sgd")
    found.model.to(memory_format=torch.channels_last)
    found.batch["x"] = found.batch["x"].to(memory_format=torch.channels_last)
    return found


@job
def timm_convnext():
    return of_timm("convnext_tiny", images(32, 224))


@job
def timm_efficientnet():
    return of_timm("efficientnet_b0", images(64, 224), dtype=torch.bfloat16, optimizer="sgd")


@job
def torchvision_resnet50():
    from torchvision.models import resnet50

    return Job(resnet50(), images(64, 224), classified, optimizer="sgd")


@job
def torchvision_swin():
    from torchvision.models import swin_t

    return Job(swin_t(), images(32, 224), classified, dtype=torch.bfloat16)


@job
def torchvision_vgg():
    from torchvision.models import vgg16

    return Job(vgg16(), images(32, 224), classified, optimizer="sgd")


@job
def deeplab():
    from torchvision.models.segmentation import deeplabv3_resnet50

    model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)
    batch = {"x": torch.randn(4, 3, 384, 384), "y": torch.randint(21, (4, 384, 384))}
    return Job(model, batch, lambda m, b: F.cross_entropy(m(b["x"])["out"], b["y"]), optimizer="sgd")


@job
def faster_rcnn():
    from torchvision.models.detection import fasterrcnn_resnet50_fpn

    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    boxes = torch.tensor([[40.0, 40.0, 300.0, 300.0], [100.0, 60.0, 500.0, 400.0]])
    batch = {"x": torch.randn(2, 3, 600, 800), "boxes": boxes, "labels": torch.tensor([1, 2])}

    def loss_of(model, batch):
        targets = [{"boxes": batch["boxes"], "labels": batch["labels"]} for _ in range(2)]
        return sum(model(list(batch["x"]), targets).values())

    return Job(model, batch, loss_of, optimizer="sgd")


@job
def diffusion():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=64, block_out_channels=(192, 384, 768, 768), cross_attention_dim=768, attention_head_dim=8
    )
    batch = {
        "x": torch.randn(4, 4, 64, 64),
        "t": torch.randint(1000, (4,)),
        "text": torch.randn(4, 77, 768),
        "y": torch.randn(4, 4, 64, 64),
    }

    def loss_of(model, batch):
        return F.mse_loss(model(batch["x"], batch["t"], batch["text"]).sample.float(), batch["y"])

    return Job(model, batch, loss_of, dtype=torch.bfloat16, clip=True)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(33278, 1500)
        self.lstm = nn.LSTM(1500, 1500, 2, dropout=0.5)
        self.head = nn.Linear(1500, 33278)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


@job
def lstm():
    ids = tokens(33278, 36, 40)
    loss = lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["y"].flatten())  # noqa: E731
    return Job(Words(), {"x": ids[:-1], "y": ids[1:]}, loss, optimizer="sgd", clip=True)


class Volumes(nn.Sequential):
    def __init__(self):
        layers, before = [], 1
        for width in (16, 32, 64, 128):
            layers += [nn.Conv3d(before, width, 3, padding=1), nn.InstanceNorm3d(width), nn.LeakyReLU()]
            layers.append(nn.MaxPool3d(2))
            before = width
        super().__init__(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(before, 10))


@job
def volumes():
    return Job(Volumes(), {"x": torch.randn(2, 1, 64, 96, 96), "y": torch.randint(10, (2,))}, classified)


class Graph(nn.Module):
    def __init__(self):
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.layers = nn.ModuleList([GCNConv(128, 256), GCNConv(256, 256), GCNConv(256, 40)])

    def forward(self, x, edges):
        for layer in self.layers[:-1]:
            x = F.dropout(layer(x, edges).relu(), training=self.training)
        return self.layers[-1](x, edges)


@job
def graph():
    batch = {
        "x": torch.randn(20000, 128),
        "edges": torch.randint(20000, (2, 200000)),
        "y": torch.randint(40, (20000,)),
    }
    return Job(Graph(), batch, lambda m, b: F.cross_entropy(m(b["x"], b["edges"]), b["y"]))


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(JOBS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    found = JOBS[args.name]()
    device = torch.device("cuda")
    model = found.model.to(device).train()
    optimizer = OPTIMIZERS[found.optimizer](found.parameters)
    scaler = torch.amp.GradScaler("cuda", enabled=found.dtype == torch.float16)
    called = torch.compile(model) if args.compile else model
    for step in range(args.steps):
        batch = {name: value.to(device) for name, value in found.batch.items()}
        with torch.autocast("cuda", dtype=found.dtype) if found.dtype else contextlib.nullcontext():
            loss = found.loss_of(called, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if found.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(found.parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(step, loss.item(), flush=True)


if __name__ == "__main__":
    main()
