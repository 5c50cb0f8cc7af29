"""Declares the operators that torchvision's Python code registers shapes for when it is imported.

The package index has torchvision built for CUDA only, whose operators do not load without CUDA's libraries. timm uses
its Python code alone, which is imported where the names exist; nothing here calls one.
"""

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
