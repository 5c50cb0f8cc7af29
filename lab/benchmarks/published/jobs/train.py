"""Trains one of the jobs of peaks.toml: python train.py NAME."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch
from families import bert_large, course_lm, gpt2, resnet50, small_transformer, unet, video, vit_l_16
from families.gpt2 import Variant

_SCRATCH = Variant(stored_mask=False, tensor_cores=True, fused_optimizer=True, bfloat16=True)
_BINARY = partial(unet.train, classes=2, parameters=29_060_676)

JOBS = {
    # The Hugging Face guide's single-GPU training of BERT-large.
    "bert_large_batch_4": partial(bert_large.train, batch=4),
    "bert_large_accumulated": partial(bert_large.train, batch=1, accumulate=4),
    "bert_large_checkpointed": partial(bert_large.train, batch=1, accumulate=4, checkpointing=True),
    "bert_large_fp16": partial(bert_large.train, batch=4, fp16=True),
    "bert_large_fp16_checkpointed": partial(bert_large.train, batch=1, accumulate=4, checkpointing=True, fp16=True),
    "course_lm": partial(course_lm.accumulate, batch=32),
    # The book's 00_orig.py, and its list's improvements 1 to 5, 6 and 7.
    "gpt2_fp32": partial(gpt2.train, Variant(stored_mask=True)),
    "gpt2_bf16": partial(gpt2.train, _SCRATCH),
    "gpt2_bf16_native": partial(gpt2.train, replace(_SCRATCH, native_modules=True)),
    "gpt2_bf16_flash": partial(gpt2.train, replace(_SCRATCH, native_modules=True, flash_attention=True)),
    "resnet50_fp32": partial(resnet50.classify, batch=256, precision=torch.float32),
    "resnet50_fp16": partial(resnet50.classify, batch=256, precision=torch.float16),
    "resnet50_bf16": partial(resnet50.classify, batch=256, precision=torch.bfloat16),
    "small_transformer": small_transformer.train,
    # One GPU's share of UCF-101 and Kinetics-400.
    "tsn_r50_3_segments": partial(resnet50.classify_videos, videos=32, segments=3, classes=101),
    "tsn_r50_8_segments": partial(resnet50.classify_videos, videos=32, segments=8, classes=400),
    "c3d": partial(video.train_c3d, classes=101, clips=(30, 16, 112)),
    "r2plus1d_8_frames": partial(video.train_r2plus1d, classes=400, clips=(8, 8, 224)),
    "r2plus1d_32_frames": partial(video.train_r2plus1d, classes=400, clips=(6, 32, 224)),
    # One GPU's share of DRIVE, STARE, HRF and Cityscapes.
    "unet_64": partial(_BINARY, 64, 64),
    "unet_128": partial(_BINARY, 128, 128),
    "unet_256": partial(_BINARY, 256, 256),
    "unet_512_1024": partial(unet.train, 512, 1024, classes=19, parameters=29_062_886),
    # The article's five scripts, and PyTorch's tutorial before and after it fuses the optimizer into the backward.
    "vit_l_16_fp32": partial(vit_l_16.finetune, batch=64, precision="32-true"),
    "vit_l_16_fp16_mixed": partial(vit_l_16.finetune, batch=64, precision="16-mixed"),
    "vit_l_16_bf16": partial(vit_l_16.finetune, batch=64, precision="bf16-true"),
    "vit_l_16_bf16_batch_16": partial(vit_l_16.finetune, batch=16, precision="bf16-true"),
    "vit_l_16_bf16_accumulated": partial(vit_l_16.finetune, batch=4, precision="bf16-true", accumulate=4),
    "vit_l_16_tutorial": vit_l_16.follow_tutorial,
    "vit_l_16_tutorial_fused": vit_l_16.follow_tutorial_fused,
}

if __name__ == "__main__":
    JOBS[sys.argv[1]]()
