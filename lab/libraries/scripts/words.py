"""A tokenizer built in place, a small model for it, and made-up texts."""

import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(252))]
_TEMPLATE = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} </s> {% endfor %}"


def tokenizer():
    """Returns a tokenizer of 256 words."""
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=_TEMPLATE,
        padding_side="left",
    )


def model():
    """Returns a small LLaMA."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def text(count, seed):
    """Returns a text of so many words."""
    return " ".join(random.Random(seed).choices(WORDS[4:], k=count))
