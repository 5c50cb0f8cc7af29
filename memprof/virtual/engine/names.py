"""Enumerations of Transformer Engine's compiled extension, whose members its Python code reads by name."""

from __future__ import annotations

import enum
from typing import Any

import torch

#: transformer_engine.h; the names are those of ``pybind_helper.h`` and ``pybind.cpp``.
_DTYPES = {
    "kByte": torch.uint8,
    "kInt32": torch.int32,
    "kFloat32": torch.float32,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
    "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
    "kFloat4E2M1": torch.uint8,
}
_FORMATS = "BSHD SBHD THD SBHD_2BSHD BSHD_2SBHD THD_2BSHD THD_2SBHD BHSD"
_LAYOUTS = (
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD T3HD TH3D "
    "THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
    "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
    "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD"
)
_MASKS = "NO PADDING CAUSAL PADDING_CAUSAL CAUSAL_BOTTOM_RIGHT PADDING_CAUSAL_BOTTOM_RIGHT"
_MEMBERS = {
    "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
    "NVTE_Mask_Type": " ".join(f"NVTE_{name}_MASK" for name in _MASKS.split()),
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    "NVTE_QKV_Format": " ".join(f"NVTE_{name}" for name in (*_FORMATS.split(), "QKV_Format_NOT_SET")),
    "NVTE_QKV_Layout": " ".join(f"NVTE_{name}" for name in (*_LAYOUTS.split(), "QKV_Layout_NOT_SET")),
    "NVTE_Fused_Attn_Backend": "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8",
    "NVTEScalingMode": "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D "
    "NVTE_BLOCK_SCALING_2D NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING",
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT INVALID",
    "CommOverlapType": "RS AG",
    "CommOverlapAlgo": "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
    "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT "
    "GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
    "NVTEQBHistogramMode": "TWO_KERNEL FUSED_ATOMIC",
    "DType": " ".join(_DTYPES),
}


def _enumeration(name: str, members: str) -> Any:
    return enum.IntEnum(name, {member: number for number, member in enumerate(members.split())})


#: By name.
ENUMERATIONS: dict[str, Any] = {name: _enumeration(name, members) for name, members in _MEMBERS.items()}
_TORCH = dict(enumerate(_DTYPES.values()))


def torch_dtype(value: Any) -> torch.dtype:
    """Returns the dtype of a member of ``DType``, or of torch."""
    return value if isinstance(value, torch.dtype) else _TORCH[int(value)]
