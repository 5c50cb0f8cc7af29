"""Why fp16 is refused: the sentences that a prediction and a run share."""

from __future__ import annotations

CREATE_GRAPH = (
    "precision: gradients are computed with create_graph=True, which fp16 loss scaling does not support; write "
    "dtype = 'bf16'."
)
NOT_OF_OUTPUT = (
    "precision: part of the loss does not come from the model's output (a penalty on weights, or a tensor that a hook "
    "or an attribute took out of the model), and loss scaling for fp16 would lose its gradient; return it from "
    "forward, or write dtype = 'bf16'."
)
LBFGS = (
    "precision: LBFGS runs the model several times per step, which fp16 loss scaling does not support; write "
    "dtype = 'bf16'."
)
