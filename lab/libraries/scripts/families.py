"""Small random models of transformers' families, from configurations, and batches for them."""

import torch
import transformers

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH, BATCH, STEPS = 96, 4, 3, 256, 64, 4, 8
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
USUAL = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    **TOKENS,
}
GROUPED = {**USUAL, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2}
TWO_SIDED = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 4 * WIDTH,
    "decoder_ffn_dim": 4 * WIDTH,
    "decoder_start_token_id": 0,
}
PICTURES = {
    **{name: USUAL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    "image_size": 32,
    "patch_size": 4,
}
SOUNDS = {
    **{name: USUAL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    "vocab_size": 32,
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 3,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
#: Family: configuration's type, head, batch, settings. The kinds of batch are below.
FAMILIES = {
    "gpt2": (
        "CausalLM",
        "text",
        {
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "vocab_size": VOCABULARY,
            "n_positions": LENGTH,
            **TOKENS,
        },
    ),
    "llama": ("CausalLM", "text", GROUPED),
    "mistral": ("CausalLM", "text", GROUPED),
    "qwen3": ("CausalLM", "text", {**GROUPED, "head_dim": 24}),
    "gemma2": ("CausalLM", "text", {**GROUPED, "head_dim": 24, "query_pre_attn_scalar": 24}),
    "phi3": ("CausalLM", "text", GROUPED),
    "opt": ("CausalLM", "text", {**USUAL, "ffn_dim": 4 * WIDTH, "word_embed_proj_dim": WIDTH}),
    "gpt_neox": ("CausalLM", "text", USUAL),
    "bloom": (
        "CausalLM",
        "text",
        {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCABULARY, **TOKENS},
    ),
    "falcon": ("CausalLM", "text", USUAL),
    "bert": ("SequenceClassification", "labelled", USUAL),
    "roberta": ("MaskedLM", "text", {**USUAL, "max_position_embeddings": LENGTH + 8}),
    "distilbert": (
        "SequenceClassification",
        "labelled",
        {"dim": WIDTH, "hidden_dim": 4 * WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "vocab_size": VOCABULARY},
    ),
    "electra": ("SequenceClassification", "labelled", {**USUAL, "embedding_size": WIDTH}),
    "modernbert": ("MaskedLM", "text", {**USUAL, "cls_token_id": 0, "sep_token_id": 1}),
    "deberta-v2": (
        "SequenceClassification",
        "labelled",
        {**USUAL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "t5": (
        "Seq2SeqLM",
        "pairs",
        {
            "d_model": WIDTH,
            "d_kv": 24,
            "d_ff": 4 * WIDTH,
            "num_layers": 2,
            "num_heads": HEADS,
            "vocab_size": VOCABULARY,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": (
        "Seq2SeqLM",
        "pairs",
        {**TWO_SIDED, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, **TOKENS},
    ),
    "mbart": (
        "Seq2SeqLM",
        "pairs",
        {**TWO_SIDED, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, **TOKENS},
    ),
    "vit": ("ImageClassification", "images", PICTURES),
    "dinov2": ("ImageClassification", "images", {**PICTURES, "mlp_ratio": 4}),
    "swin": (
        "ImageClassification",
        "images",
        {"image_size": 32, "patch_size": 2, "embed_dim": 24, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    ),
    "convnext": (
        "ImageClassification",
        "images",
        {"hidden_sizes": [24, 48], "depths": [1, 2], "num_stages": 2, "patch_size": 2},
    ),
    "segformer": ("SemanticSegmentation", "segments", {}),
    "whisper": (
        "SpeechSeq2Seq",
        "spoken",
        {
            **TWO_SIDED,
            "vocab_size": VOCABULARY,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": LENGTH,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
            **TOKENS,
        },
    ),
    "wav2vec2": ("CTC", "sounds", SOUNDS),
    "hubert": ("CTC", "sounds", SOUNDS),
    "mixtral": ("CausalLM", "text", {**GROUPED, **EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": (
        "CausalLM",
        "text",
        {**GROUPED, **EXPERTS, "head_dim": 24, "num_experts": 4, "moe_intermediate_size": 96},
    ),
    "gpt_oss": ("CausalLM", "text", {**GROUPED, **EXPERTS, "head_dim": 24, "num_local_experts": 4}),
    "mamba": ("CausalLM", "text", {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}),
    "mamba2": (
        "CausalLM",
        "text",
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "vocab_size": VOCABULARY,
            "num_heads": 8,
            "head_dim": 24,
            "state_size": 16,
            "n_groups": 1,
        },
    ),
    "rwkv": (
        "CausalLM",
        "text",
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "vocab_size": VOCABULARY,
            "attention_hidden_size": WIDTH,
            "context_length": LENGTH,
        },
    ),
}


def build(family, attention):
    """Returns a model of a family with an implementation of attention (None: its default), and its batches."""
    head, kind, settings = FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **settings)
    if "labels" in kind or kind in ("labelled", "images", "segments"):
        config.num_labels = 4
    options = {} if attention is None else {"attn_implementation": attention}
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config, **options)
    generator = torch.Generator().manual_seed(1)
    return model, [BATCHES[kind](generator) for _ in range(STEPS)]


def train(model, batches, *, clips=False):
    """Trains a model's trainable parameters on each batch once, and prints the losses."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step, batch in enumerate(batches):
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())


def _numbers(most, *shape, generator):
    return torch.randint(3, most, shape, generator=generator)


def _text(generator):
    ids = _numbers(VOCABULARY, BATCH, LENGTH, generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _labelled(generator):
    ids, mask = _numbers(VOCABULARY, BATCH, LENGTH, generator=generator), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, LENGTH // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 4, (BATCH,), generator=generator)}


def _pairs(generator):
    return {
        "input_ids": _numbers(VOCABULARY, BATCH, LENGTH, generator=generator),
        "labels": _numbers(VOCABULARY, BATCH, LENGTH // 2, generator=generator),
    }


def _images(generator):
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, 4, (BATCH,), generator=generator)}


def _segments(generator):
    images = torch.randn(BATCH, 3, 64, 64, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, 4, (BATCH, 64, 64), generator=generator)}


def _spoken(generator):
    sounds = torch.randn(BATCH, 16, 64, generator=generator)
    return {"input_features": sounds, "labels": _numbers(VOCABULARY, BATCH, LENGTH // 2, generator=generator)}


def _sounds(generator):
    sounds = torch.randn(BATCH, 2_000, generator=generator)
    return {"input_values": sounds, "labels": _numbers(32, BATCH, 12, generator=generator)}


BATCHES = {
    "text": _text,
    "labelled": _labelled,
    "pairs": _pairs,
    "images": _images,
    "segments": _segments,
    "spoken": _spoken,
    "sounds": _sounds,
}
