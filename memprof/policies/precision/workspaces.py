"""Computes operator workspaces in a short type.

On CUDA the libraries' workspaces are the same for both types and stay as recorded. On a CPU they follow oneDNN,
measured with torch 2.13 on a machine with AVX-512 (AMD EPYC), with oneDNN limited to AVX2 and to AVX-512 without
bf16 as well; each rule states its measurement. Where oneDNN has no kernels in the short type, torch's own run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.precision.autocast_lists import SHORT_TYPES, WIDEST, is_one_of
from memprof.policies.precision.convolutions import depthwise_ops, shapes_of, unfolded_bytes
from memprof.policies.rewrite.depthwise import has_copies, is_depthwise, short_copies_bytes
from memprof.policies.rewrite.elements import element_bytes
from memprof.policies.rewrite.views_read import bytes_read
from memprof.replay.rounding import rounded
from memprof.trace.files.coding.coded import Coded
from memprof.trace.schema import NONE, Bools, Floats, Ints

if TYPE_CHECKING:
    from memprof.policies.precision.flow import Types
    from memprof.policies.rewrite.draft import Draft
    from memprof.trace.step import Step

#: Bytes a recurrent layer keeps for its backward, relative to float32: 0.706 to 0.713 in eight of nine sizes measured
#: (16 to 512 wide), 0.857 in the smallest: gates and states are short, cell states are not.
RECURRENT_SHARE = 0.7085
#: The same of cuDNN, whose cell states are short as well: 251,658,240 of 503,317,248 bytes in three layers on an H200.
CUDNN_RESERVE_SHARE = 0.5
_CUDNN_LAYER = "_cudnn_rnn"
#: Bytes a recurrent layer takes in evaluation, relative to float32: 0.511 to 0.520 in five of six sizes measured (16
#: to 512 wide), 0.545 at a width of 100.
EVALUATED_SHARE = 0.52
#: What oneDNN's convolutions in bf16 took at most on unseen jobs, relative to the prediction (1.252, with 64 channels).
CONVOLUTION_EXCESS = 1.3
_SCATTERS = ("scatter", "scatter_add", "scatter_add_", "scatter_reduce")
#: oneDNN lays channels out in groups of this size.
CHANNELS = 16
#: Columns that oneDNN's bf16 product packs at a time, the multiple their depth is padded to, and the rows and the depth
#: of the parts that it sums.
PACKED_COLUMNS, PACKED_DEPTH, SUMMED_ROWS, SUMMED_DEPTH = 64, 32, 256, 512
#: With AMX: columns that a tile holds, bytes of the second operand that a thread packs at most, and of a pair of tiles.
TILED_COLUMNS, PACKED_BYTES, TILES_BYTES = 16, 2**20, 4096
#: Up to this many multiplications torch computes a product without oneDNN.
SMALLEST_PRODUCT = 16 * 16 * 16


def short_workspaces(
    draft: Draft, step: Step, types: Types, is_short: Bools, dtype: str, *, at_most: bool = False
) -> None:
    """Sets the temporaries of operators that run in the short type, and of operators with mixed types.

    Args:
        draft: The step being rewritten.
        step: The recorded step.
        types: The types in it.
        is_short: Which recorded storages are short, ``(storages,)``.
        dtype: The short type: bf16 or fp16.
        at_most: Whether to assume the most that convolutions were seen to take.
    """
    ops, uses, storages = step.ops, step.uses, step.storages
    forward = types.forward
    of_op = np.where(forward != NONE, forward, np.arange(len(ops)))
    is_inside = types.region[of_op] != NONE
    workspace = draft.ops.workspace_bytes.copy()
    own = workspace[: len(ops)]
    if types.device == "cuda":
        # Most of what cuDNN takes are copies of operands in another layout. Workspaces of cuBLAS stay as they are.
        runs_short = is_inside & types.is_short_out[of_op]
        own[runs_short & is_one_of(types.names[of_op], ("convolution", _CUDNN_LAYER))] //= 2
        draft.ops = draft.ops.replace(workspace_bytes=workspace)
        _reserves(draft, step, types, runs_short, _CUDNN_LAYER, CUDNN_RESERVE_SHARE)
        return
    # Copies in another layout, and pointwise temporaries, have the type of their source.
    own[is_inside & types.is_short_out[of_op]] //= 2
    # A pointwise operator with operands of two types first copies the short ones to float32.
    is_mixed = (types.region != NONE) & (types.rule == WIDEST) & ~types.is_short_out
    is_copied = is_mixed[uses.op_id] & (uses.role == "read") & is_short[uses.storage_id]
    # In backward it multiplies a float32 gradient by what forward saved.
    is_product = (forward != NONE) & (types.names == "mul") & (types.rule[of_op] == WIDEST) & ~types.is_short_out
    is_copied |= is_product[uses.op_id] & (uses.role == "read") & types.is_short[uses.storage_id]
    np.add.at(own, uses.op_id[is_copied], storages.requested_bytes[uses.storage_id[is_copied]])
    runs_short = is_inside & types.is_short_out[of_op]
    has_kernels = SHORT_TYPES[dtype] in step.short_types
    _convolutions(own, step, types, of_op, runs_short, has_kernels=has_kernels)
    if step.has_amx and dtype == "bf16":
        _tiled_convolutions(own, step, types, of_op, runs_short)
    if at_most:
        is_convolution = runs_short & (types.names[of_op] == "convolution")
        own[is_convolution] = np.ceil(own[is_convolution] * CONVOLUTION_EXCESS)
    if has_kernels:
        _products(own, step, types, of_op, runs_short)
    _scatters(own, step, types, runs_short, is_short)
    draft.ops = draft.ops.replace(workspace_bytes=workspace)
    _means(draft, step, types, runs_short)
    _recurrent_products(draft, step, types, runs_short)
    _reserves(draft, step, types, runs_short, "mkldnn_rnn_layer", RECURRENT_SHARE)


def _means(draft: Draft, step: Step, types: Types, runs_short: Bools) -> None:
    """Adds a float32 copy of the input and a float32 result to means: on a CPU torch sums short types in float32."""
    uses, storages, forward = step.uses, step.storages, types.forward
    is_mean = runs_short & (types.names == "mean") & (forward == NONE)
    rows = np.flatnonzero(is_mean[uses.op_id] & types.is_float[uses.storage_id])
    workspace = draft.ops.workspace_bytes.copy()
    workspace[: len(is_mean)][is_mean] = 0
    np.add.at(workspace, uses.op_id[rows], storages.requested_bytes[uses.storage_id[rows]])
    draft.ops = draft.ops.replace(workspace_bytes=workspace)


def _scatters(own: Ints, step: Step, types: Types, runs_short: Bools, is_short: Bools) -> None:
    """Adds a float32 copy of the result to scatters in a short type, which torch sums up so on a CPU.

    Not to those with an index expanded over rows, as of graphs: they take a row in float32. Their index has fewer
    elements than what they write.
    """
    uses, storages = step.uses, step.storages
    is_scatter = runs_short & is_one_of(types.names, _SCATTERS)
    # What is scattered is often a part of a gradient, such as of what was concatenated.
    read_bytes = storages.requested_bytes[uses.storage_id]
    reads = np.flatnonzero(is_scatter[uses.op_id] & (uses.role == "read"))
    read_bytes[reads] = bytes_read(step, uses.storage_id[reads], uses.op_id[reads])
    for op in np.flatnonzero(is_scatter).tolist():
        rows = slice(*np.searchsorted(uses.op_id, [op, op + 1]))
        ids, is_read = uses.storage_id[rows], uses.role[rows] == "read"
        read, written = ids[is_read], ids[uses.role[rows] == "write"]
        is_index = storages.dtype[read] == "int64"
        elements = read_bytes[rows][is_read] // element_bytes(storages.dtype[read])
        if elements[is_index].max(initial=0) >= elements[~is_index].min(initial=np.iinfo(np.int64).max):
            own[op] += storages.requested_bytes[written[is_short[written]]].sum()


def _reserves(draft: Draft, step: Step, types: Types, runs_short: Bools, layer: str, share: float) -> None:
    """Shrinks what recurrent layers keep for their backward, which the trace records as plain bytes."""
    created = draft.storages.created_op_id[: len(step.storages)]
    is_kept = (step.storages.dtype == "uint8") & (created != NONE)
    is_kept[is_kept] = (types.names[created[is_kept]] == layer) & runs_short[created[is_kept]]
    rows = np.flatnonzero(is_kept)
    requested, allocated = draft.storages.requested_bytes.copy(), draft.storages.allocated_bytes.copy()
    requested[rows] = np.round(requested[rows] * share)
    allocated[rows] = rounded(requested[rows], step.storages.device[rows])
    draft.storages = draft.storages.replace(requested_bytes=requested, allocated_bytes=allocated)


def _recurrent_products(draft: Draft, step: Step, types: Types, runs_short: Bools) -> None:
    """Adds a copy of the weights to recurrent layers; in backward also a float32 sum of their gradients and the gates.

    Measured for widths of 64, 128 and 256: within 6 per cent forward and 2 per cent backward of the two larger ones.
    """
    uses, storages = step.uses, step.storages
    workspace = draft.ops.workspace_bytes.copy()
    forward = np.where(types.forward != NONE, types.forward, np.arange(len(types.forward)))
    rows = np.flatnonzero(runs_short & (types.names[forward] == "mkldnn_rnn_layer"))
    for op in rows[np.char.startswith(types.names[rows].astype(str), "mkldnn_rnn_layer")]:
        begin, end = np.searchsorted(uses.op_id, [forward[op], forward[op] + 1])
        ids = uses.storage_id[begin:end]
        shapes = [[int(size) for size in str(storages.shape[i]).split("x") if size.isdigit()] for i in ids]
        is_weight = storages.category[ids] == "parameter"
        weights = [shape for shape, weight in zip(shapes, is_weight, strict=True) if weight and len(shape) == 2]
        made = [s for s, i in zip(shapes, ids, strict=True) if storages.created_op_id[i] == forward[op] and len(s) == 3]
        if not weights or not made:
            continue
        keeps = np.any((storages.created_op_id == forward[op]) & (storages.dtype == "uint8"))
        if not keeps:  # evaluation, where it is a temporary
            workspace[op] = int(EVALUATED_SHARE * step.ops.workspace_bytes[op])
            continue
        elements = sum(rows_ * columns for rows_, columns in weights)
        gates = int(np.prod(made[0])) * weights[0][0] // made[0][-1]
        workspace[op] = 2 * elements if op == forward[op] else 6 * elements + 2 * gates
    draft.ops = draft.ops.replace(workspace_bytes=workspace)


def _products(own: Ints, step: Step, types: Types, of_op: Ints, runs_short: Bools) -> None:
    """Adds the buffers of oneDNN's kernel to matrix products in bf16; float32 has none recorded.

    Torch uses a kernel without buffers for products of up to 16 x 16 x 16. `packed_bytes` and `tiled_bytes` give those
    of others.
    """
    uses, storages = step.uses, step.storages
    is_product = runs_short & is_one_of(types.names, ("mm", "addmm")) & (own == 0)
    sizes = np.where(types.is_float, storages.requested_bytes // 4, 0)[uses.storage_id]
    is_weight = (storages.category == "parameter")[uses.storage_id]
    created = storages.created_op_id[uses.storage_id]
    is_gradient = (step.ops.phase == "backward")[created] & (created != NONE)
    has_weight = np.zeros(len(own), dtype=np.bool_)
    shapes = Coded.of(storages.shape)
    # A bias is not an operand: it has one dimension.
    has_two = np.array(["x" in str(shape) for shape in shapes.distinct], dtype=np.bool_)
    is_matrix = has_two[shapes.codes][uses.storage_id]
    is_read = is_product[uses.op_id] & (uses.role == "read") & is_matrix
    has_weight[uses.op_id[is_read & is_weight]] = True
    # The second operand: the weight, or for the weight's gradient the tensor saved by forward.
    is_second = is_read & np.where(has_weight[uses.op_id], is_weight, ~is_gradient)
    first, second, made = (np.zeros(len(own), dtype=np.int64) for _ in range(3))
    for elements, rows in (
        (first, is_read & ~is_second),
        (second, is_second),
        (made, is_product[uses.op_id] & (uses.role == "write")),
    ):
        np.maximum.at(elements, uses.op_id[rows], sizes[rows])
    rows = np.flatnonzero(is_product & (first > 0) & (second > 0) & (made > 0))
    depth = np.sqrt(first[rows] / made[rows] * second[rows])
    high, wide = first[rows] / depth, second[rows] / depth
    is_transposed = (of_op[rows] != rows) & ~has_weight[rows]
    if step.has_amx:
        is_layer = has_weight[rows] & (of_op[rows] == rows)
        buffers = tiled_bytes(high, depth, wide, is_transposed, is_layer & (wide > step.threads * high))
    else:
        buffers = packed_bytes(high, depth, wide, is_transposed)
    workspace = 1024 + step.threads * buffers
    own[rows] = np.where(high * depth * wide > SMALLEST_PRODUCT, np.rint(workspace), 0).astype(np.int64)


def packed_bytes(high: Floats, depth: Floats, wide: Floats, is_transposed: Bools) -> Floats:
    """Returns a thread's buffers in bf16 products of ``(high, depth)`` and ``(depth, wide)`` with AVX-512.

    It packs 64 columns of the second operand, sums up to 256 rows of them in float32 (of all columns, where the depth
    is divided for a weight's gradient), and copies the first operand if it is transposed, as in weight gradients.
    Measured on an AMD EPYC for 180 sizes up to 512 on one thread: exact. On an Intel Xeon held to AVX-512, 288 sizes
    up to 4,096: exact for other products; in those of weights' gradients, 256 rows are copied at a time there.

    Args:
        high: Rows of the first operand.
        depth: Its columns.
        wide: Columns of the second operand.
        is_transposed: Whether the first operand is.
    """
    padded = np.ceil(depth / PACKED_DEPTH) * PACKED_DEPTH
    part = np.minimum(padded, SUMMED_DEPTH)
    is_divided = is_transposed & (padded > SUMMED_DEPTH)
    # Rows a multiple of 1,024 bytes apart are padded further, to avoid sharing cache lines.
    apart = part + np.where(part % 512 == 0, PACKED_DEPTH, 0)
    summed = np.where(is_divided, wide, np.minimum(wide, PACKED_COLUMNS))
    copied = np.where(is_transposed, np.minimum(high, 2 * SUMMED_ROWS) * apart * 2 + 128, 0)
    buffers: Floats = part * PACKED_COLUMNS * 2 + np.minimum(high, SUMMED_ROWS) * summed * 4 + copied
    return buffers


def tiled_bytes(high: Floats, depth: Floats, wide: Floats, is_transposed: Bools, has_few_rows: Bools) -> Floats:
    """Returns a thread's buffers in bf16 products with AMX: the tiles' and up to 1 MiB of the second operand.

    Measured on an Intel Xeon for 576 sizes up to 4,096, on one thread and two. On one, not transposed: exact to 2 KiB
    in 181 of 192. On two, more than measured in two of five, by up to 1 MiB. Transposed: off by up to 264 KiB.

    Args:
        high: Rows of the first operand.
        depth: Its columns.
        wide: Columns of the second operand.
        is_transposed: Whether the first operand is: up to 256 of its rows are copied, and 64 columns packed.
        has_few_rows: Whether the second operand is a layer's weight in forward, stored as (wide, depth), and a thread
            has fewer rows than columns: 32 of these are packed at a time.
    """
    padded = np.ceil(depth / PACKED_DEPTH) * PACKED_DEPTH
    tiles = np.ceil(wide / TILED_COLUMNS)
    columns = 2 * TILED_COLUMNS * np.where(wide == 1, 2, np.ceil(tiles / 2))  # tiles come in pairs
    columns = np.where(has_few_rows & (depth >= 2 * PACKED_DEPTH), 2 * TILED_COLUMNS, columns)
    copied = np.minimum(high, SUMMED_ROWS) * (padded + PACKED_DEPTH) * 2 + 128
    packed = np.minimum(2 * padded * np.where(is_transposed, np.minimum(wide, PACKED_COLUMNS), columns), PACKED_BYTES)
    is_half = (tiles % 2 == 1) & (wide > 1) & ~is_transposed
    buffers: Floats = TILES_BYTES / np.where(is_half, 2, 1) + packed + np.where(is_transposed, copied, 0)
    return buffers


def _convolutions(own: Ints, step: Step, types: Types, of_op: Ints, runs_short: Bools, *, has_kernels: bool) -> None:
    """Sets the temporaries of convolutions: oneDNN's layouts, or unfolded columns without its kernels."""
    names = types.names
    convolutions = np.flatnonzero(runs_short & is_one_of(names, ("convolution", "convolution_backward")))
    if not len(convolutions):
        return
    uses = step.uses
    begin, end = np.searchsorted(uses.op_id, convolutions), np.searchsorted(uses.op_id, convolutions, side="right")
    # Loops over convolutions only, because their shapes are text.
    for op, first, last in zip(convolutions, begin, end, strict=True):
        forward_op = int(of_op[op])
        if forward_op != op:
            rows = slice(*np.searchsorted(uses.op_id, [forward_op, forward_op + 1]))
        else:
            rows = slice(first, last)
        shapes = shapes_of(step, rows)
        if shapes is None:
            continue
        weight, given, made = shapes
        kernel = int(np.prod(weight[2:]))
        recorded = int(step.ops.workspace_bytes[op])
        if not has_kernels:
            own[op] = unfolded_bytes(weight, given, made, is_backward=forward_op != op)
        elif kernel == 1:
            # Both sides are laid out in groups of channels; float32 does so for different sizes.
            padded = sum(
                2 * side[0] * -(-side[1] // CHANNELS) * CHANNELS * int(np.prod(side[2:])) for side in (given, made)
            )
            if given[1] % CHANNELS or made[1] % CHANNELS:
                own[op] = max(own[op], padded)
        elif forward_op != op and has_copies(weight, recorded):
            own[op] = short_copies_bytes(weight, given, made, recorded)
        elif forward_op != op and not is_depthwise(weight):
            # Gradients of weights are summed in float32.
            own[op] += 4 * int(np.prod(weight))


def _tiled_convolutions(own: Ints, step: Step, types: Types, of_op: Ints, runs_short: Bools) -> None:
    """Adds to convolutions in AMX tiles a second copy of the output, in another layout.

    Measured on an Intel Xeon with oneDNN limited to AMX and to AVX-512: twice the output instead of once in seven of
    nine convolutions, of 1 x 1 and 3 x 3; the two with strides took more. Backward is as without. Depthwise
    convolutions do not run in tiles.
    """
    uses, storages = step.uses, step.storages
    is_tiled = runs_short & is_one_of(types.names, ("convolution",)) & (of_op == np.arange(len(own)))
    is_tiled[depthwise_ops(step, np.flatnonzero(is_tiled))] = False
    made = np.zeros(len(own), dtype=np.int64)
    rows = np.flatnonzero(is_tiled[uses.op_id] & (uses.role == "write") & types.is_float[uses.storage_id])
    np.maximum.at(made, uses.op_id[rows], storages.requested_bytes[uses.storage_id[rows]] // 2)
    np.maximum(own, 2 * made, out=own)
