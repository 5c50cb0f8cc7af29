"""Models that people train, at the sizes they train them, with random weights and data: NAME [--steps N]."""

from __future__ import annotations

import argparse
import contextlib

import torch
from torch import nn
from torch.nn import functional as F


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


def own_loss(model, batch):
    return model(**batch).loss


def classified(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def tokens(vocabulary, *shape):
    return torch.randint(vocabulary, shape)


def images(count, side, classes=1000):
    return {"x": torch.randn(count, 3, side, side), "y": torch.randint(classes, (count,))}


def causal(config_class, count, length, dtype=torch.bfloat16, **settings):
    import transformers

    config = getattr(transformers, config_class)(**settings)
    ids = tokens(config.vocab_size, count, length)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return Job(model, {"input_ids": ids, "labels": ids}, own_loss, dtype=dtype, clip=True)


def llama(length):
    """Returns a Llama of 1.2 billion parameters in bf16, built on the device, and its batch."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = tokens(128256, 2, length)
    return model.to_empty(device="cuda"), {"input_ids": ids, "labels": ids}


def llama_lora():
    from peft import LoraConfig, get_peft_model

    model, batch = llama(1024)
    adapters = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return Job(get_peft_model(model, adapters), batch, own_loss)


def llama_checkpointed():
    model, batch = llama(2048)
    model.gradient_checkpointing_enable()
    return Job(model, batch, own_loss, clip=True)


def of_transformers(model_class, config_class, batch, *, configured=None, **settings):
    import transformers

    config = getattr(transformers, config_class)(**(configured or {}))
    return Job(getattr(transformers, model_class)(config), batch, own_loss, **settings)


def bert():
    ids = tokens(30522, 16, 512)
    batch = {"input_ids": ids, "labels": ids}
    return of_transformers("BertForMaskedLM", "BertConfig", batch, dtype=torch.float16)


def t5():
    batch = {"input_ids": tokens(32128, 8, 512), "labels": tokens(32128, 8, 128)}
    configured = {"decoder_start_token_id": 0}
    return of_transformers("T5ForConditionalGeneration", "T5Config", batch, configured=configured, clip=True)


def whisper():
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    configured = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, **heads}
    batch = {"input_features": torch.randn(4, 80, 3000), "labels": tokens(51865, 4, 128)}
    model = "WhisperForConditionalGeneration"
    return of_transformers(model, "WhisperConfig", batch, configured=configured, dtype=torch.bfloat16)


def wav2vec2():
    batch = {"input_values": torch.randn(4, 80000), "labels": tokens(31, 4, 40) + 1}
    configured = {"mask_time_prob": 0.0, "layerdrop": 0.0}
    return of_transformers("Wav2Vec2ForCTC", "Wav2Vec2Config", batch, configured=configured)


def of_timm(name, batch, **settings):
    import timm

    return Job(timm.create_model(name), batch, classified, **settings)


def timm_resnet50():
    found = of_timm("resnet50", images(64, 224), dtype=torch.float16, optimizer="sgd")
    found.model.to(memory_format=torch.channels_last)
    found.batch["x"] = found.batch["x"].to(memory_format=torch.channels_last)
    return found


def of_torchvision(name, count, **settings):
    import torchvision

    return Job(getattr(torchvision.models, name)(), images(count, 224), classified, **settings)


def deeplab():
    from torchvision.models.segmentation import deeplabv3_resnet50

    model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)
    batch = {"x": torch.randn(4, 3, 384, 384), "y": torch.randint(21, (4, 384, 384))}
    return Job(model, batch, lambda m, b: F.cross_entropy(m(b["x"])["out"], b["y"]), optimizer="sgd")


def faster_rcnn():
    from torchvision.models.detection import fasterrcnn_resnet50_fpn

    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    boxes = torch.tensor([[40.0, 40.0, 300.0, 300.0], [100.0, 60.0, 500.0, 400.0]])
    batch = {"x": torch.randn(2, 3, 600, 800), "boxes": boxes, "labels": torch.tensor([1, 2])}

    def loss_of(model, batch):
        targets = [{"boxes": batch["boxes"], "labels": batch["labels"]} for _ in range(2)]
        return sum(model(list(batch["x"]), targets).values())

    return Job(model, batch, loss_of, optimizer="sgd")


def diffusion():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=64, block_out_channels=(192, 384, 768, 768), cross_attention_dim=768, attention_head_dim=8
    )
    noisy, times, text = torch.randn(4, 4, 64, 64), torch.randint(1000, (4,)), torch.randn(4, 77, 768)
    batch = {"x": noisy, "t": times, "text": text, "y": torch.randn(4, 4, 64, 64)}

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


def graph():
    edges, labels = torch.randint(20000, (2, 200000)), torch.randint(40, (20000,))
    batch = {"x": torch.randn(20000, 128), "edges": edges, "y": labels}
    return Job(Graph(), batch, lambda m, b: F.cross_entropy(m(b["x"], b["edges"]), b["y"]))


#: Sizes of a Mixtral and a Qwen3 that fit beside their optimizer's state.
_MIXTRAL = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}
_QWEN3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16}
JOBS = {
    "gpt2": lambda: causal("GPT2Config", 8, 1024),
    "llama_lora": llama_lora,
    "llama_checkpointed": llama_checkpointed,
    "mixture": lambda: causal(
        "MixtralConfig", 4, 512, num_key_value_heads=4, num_local_experts=8, vocab_size=32000, **_MIXTRAL
    ),
    "qwen3": lambda: causal("Qwen3Config", 4, 1024, num_key_value_heads=8, vocab_size=151936, **_QWEN3),
    "mamba": lambda: causal("MambaConfig", 2, 128, dtype=None, hidden_size=512, num_hidden_layers=4, vocab_size=50280),
    "bert": bert,
    "t5": t5,
    "whisper": whisper,
    "wav2vec2": wav2vec2,
    "timm_vit": lambda: of_timm("vit_base_patch16_224", images(64, 224), dtype=torch.bfloat16),
    "timm_resnet50": timm_resnet50,
    "timm_convnext": lambda: of_timm("convnext_tiny", images(32, 224)),
    "timm_efficientnet": lambda: of_timm("efficientnet_b0", images(64, 224), dtype=torch.bfloat16, optimizer="sgd"),
    "torchvision_resnet50": lambda: of_torchvision("resnet50", 64, optimizer="sgd"),
    "torchvision_swin": lambda: of_torchvision("swin_t", 32, dtype=torch.bfloat16),
    "torchvision_vgg": lambda: of_torchvision("vgg16", 32, optimizer="sgd"),
    "deeplab": deeplab,
    "faster_rcnn": faster_rcnn,
    "diffusion": diffusion,
    "lstm": lstm,
    "volumes": volumes,
    "graph": graph,
}
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
