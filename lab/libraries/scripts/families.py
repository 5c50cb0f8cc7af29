"""Small random models of transformers' families, from configurations, and batches for them."""

from collections import ChainMap

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


def family(head, kind):
    """Returns what makes an entry of FAMILIES: the model's head, the kind of its batches, and its settings."""
    return lambda *shared, **settings: (head, kind, dict(ChainMap(settings, *shared[::-1])))


_causal, _masked, _pairs_of = family("CausalLM", "text"), family("MaskedLM", "text"), family("Seq2SeqLM", "pairs")
_classified, _seen = family("SequenceClassification", "labelled"), family("ImageClassification", "images")
_WORDS = {"vocab_size": VOCABULARY, **TOKENS}
_TRANSLATING = {**TWO_SIDED, "max_position_embeddings": LENGTH, **_WORDS}
FAMILIES = {
    "gpt2": _causal(_WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=LENGTH),
    "llama": _causal(GROUPED),
    "mistral": _causal(GROUPED),
    "qwen3": _causal(GROUPED, head_dim=24),
    "gemma2": _causal(GROUPED, head_dim=24, query_pre_attn_scalar=24),
    "phi3": _causal(GROUPED),
    "opt": _causal(USUAL, ffn_dim=4 * WIDTH, word_embed_proj_dim=WIDTH),
    "gpt_neox": _causal(USUAL),
    "bloom": _causal(_WORDS, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS),
    "falcon": _causal(USUAL),
    "bert": _classified(USUAL),
    "roberta": _masked(USUAL, max_position_embeddings=LENGTH + 8),
    "distilbert": _classified(dim=WIDTH, hidden_dim=4 * WIDTH, n_layers=LAYERS, n_heads=HEADS, vocab_size=VOCABULARY),
    "electra": _classified(USUAL, embedding_size=WIDTH),
    "modernbert": _masked(USUAL, cls_token_id=0, sep_token_id=1),
    "deberta-v2": _classified(USUAL, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "t5": _pairs_of(
        {"vocab_size": VOCABULARY, "decoder_start_token_id": 0},
        d_model=WIDTH,
        d_kv=24,
        d_ff=4 * WIDTH,
        num_layers=2,
        num_heads=HEADS,
    ),
    "bart": _pairs_of(_TRANSLATING),
    "mbart": _pairs_of(_TRANSLATING),
    "vit": _seen(PICTURES),
    "dinov2": _seen(PICTURES, mlp_ratio=4),
    "swin": _seen(image_size=32, patch_size=2, embed_dim=24, depths=[1, 1], num_heads=[2, 4], window_size=4),
    "convnext": _seen(hidden_sizes=[24, 48], depths=[1, 2], num_stages=2, patch_size=2),
    "segformer": family("SemanticSegmentation", "segments")(),
    "whisper": family("SpeechSeq2Seq", "spoken")(
        TWO_SIDED,
        {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": LENGTH},
        {"suppress_tokens": None, "begin_suppress_tokens": None, **_WORDS},
    ),
    "wav2vec2": family("CTC", "sounds")(SOUNDS),
    "hubert": family("CTC", "sounds")(SOUNDS),
    "mixtral": _causal(GROUPED, EXPERTS, num_local_experts=4),
    "qwen3_moe": _causal(GROUPED, EXPERTS, head_dim=24, num_experts=4, moe_intermediate_size=96),
    "gpt_oss": _causal(GROUPED, EXPERTS, head_dim=24, num_local_experts=4),
    "mamba": _causal(hidden_size=WIDTH, num_hidden_layers=LAYERS, vocab_size=VOCABULARY),
    "mamba2": _causal(
        {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY},
        num_heads=8,
        head_dim=24,
        state_size=16,
        n_groups=1,
    ),
    "rwkv": _causal(
        {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY},
        attention_hidden_size=WIDTH,
        context_length=LENGTH,
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
