"""Emits the forward operators of a chunked cross-entropy, as memprof.policies.loss.cross_entropy runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.rewrite.insertion import Insertion
from memprof.trace.schema import NONE
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.loss.policy import ChunkedLoss
    from memprof.policies.loss.recorded import CrossEntropy, Head

LOW = ("float16", "bfloat16")
_BYTES = {"float16": 2, "bfloat16": 2, "float64": 8}


class ForwardEmitter:
    """Writes the forward of one chunked cross-entropy.

    Attributes:
        made: Storages of the step that new operators allocate, and by which.
        kept: Storages that the node keeps for backward.
        first_forward: The operator that backward operators belong to: the first that ran after the node was made.
    """

    def __init__(
        self, insertion: Insertion, step: Step, policy: ChunkedLoss, one: CrossEntropy, head: Head | None
    ) -> None:
        """Computes the sizes of a chunk."""
        self.made: dict[int, int] = {}
        #: For gradients of 16 bits, the sums over chunks that they are made from.
        self._sums: dict[int, int] = {}
        self._insertion = insertion
        self._step = step
        self._one = one
        self._head = head
        storages, ops = step.storages, step.ops
        self.rows = one.rows
        at_a_time = -(-self.rows // policy.chunks)
        self.parts = [min(at_a_time, self.rows - start) for start in range(0, self.rows, at_a_time)]
        self._target = int(one.targets[np.argmax(storages.allocated_bytes[one.targets])])
        self._target_bytes = int(storages.allocated_bytes[self._target])
        self._is_low = str(storages.dtype[one.logits]) in LOW
        #: Whether softmax and gradient of a chunk are of another type than the logits: 32 bits.
        self._is_cast = self._is_low or one.is_cast_by_model
        self._logit_bytes = int(storages.allocated_bytes[one.logits])
        item = _BYTES.get(str(storages.dtype[one.logits]), 4)
        self._item = 4 if self._is_cast else item
        self._wide_bytes = self._logit_bytes // item * self._item
        self._share_bytes = self._target_bytes // 8 * self._item  # one number for each index of 8 bytes
        durations = np.nan_to_num(ops.duration_us)
        self._softmax_us = float(durations[one.log_softmax])
        self._likelihood_us = float(durations[one.likelihood])
        # A small operator costs as much as small recorded ones: its launch.
        small = durations[(ops.written_bytes > 0) & (ops.written_bytes <= 4096) & (ops.kind == "compute")]
        self._small_us = float(np.median(small)) if len(small) else 0.0
        self.first_forward = insertion.next_op
        self.kept: list[int] = [int(storage) for storage in one.targets]
        self._divisor = NONE
        self._hidden = NONE

    def forward(self) -> None:
        """Emits the loss of each chunk, and their sum."""
        one, insertion = self._one, self._insertion
        like = before = one.log_softmax
        if self._head is None:
            self.kept.append(one.logits)
        else:
            self._take_hidden()
            self.kept += [self._hidden, *(int(storage) for storage in (*self._head.parameters, *self._head.casts))]
        self.first_forward = insertion.next_op
        losses = []
        for rows in self.parts:
            share = rows / self.rows
            logits, held = (one.logits, ()) if self._head is None else self._chunk_logits(like, before, share)
            source = logits
            if self._was_cast():
                cast = insertion.op("aten._to_copy.default", like=like, before=before, reads=[logits])
                source = insertion.storage(int(self._wide_bytes * share), cast)
                if one.is_cast_by_model:
                    insertion.free(logits, cast)
                    held = ()
                held = (*held, source)
            op = insertion.op(
                "aten._log_softmax.default",
                like=like,
                before=before,
                reads=[source],
                writes=[insertion.next_storage],
                duration_us=self._softmax_us * share,
                workspace_bytes=int(self._step.ops.workspace_bytes[one.log_softmax] * share),
            )
            softmax_bytes = self._wide_bytes if self._was_cast() else self._logit_bytes
            softmax = insertion.storage(int(softmax_bytes * share), op)
            op = insertion.op(
                str(self._step.ops.name[one.likelihood]),
                like=like,
                before=before,
                reads=[softmax, *(int(storage) for storage in one.targets)],
                writes=[insertion.next_storage, insertion.next_storage + 1],
                duration_us=max(self._likelihood_us * share, self._small_us),
            )
            losses.append(insertion.storage(self._item, op))
            insertion.storage(self._item, op, op)  # the summed weight, which is unused
            for storage in (softmax, *held):
                insertion.free(storage, op)
        self._reduce(losses, like, before)

    def _was_cast(self) -> bool:
        """Whether autocast or the model converted all logits to 32 bits, which chunks do one by one."""
        return self._is_cast and len(self._one.backward) > 0 and self._one.logits != self._softmax_input()

    def _softmax_input(self) -> int:
        uses = self._step.uses
        rows = slice(*np.searchsorted(uses.op_id, [self._one.log_softmax, self._one.log_softmax + 1]))
        return int(uses.storage_id[rows][uses.role[rows] == "read"][0])

    def _take_hidden(self) -> None:
        """Makes the rows of the head's input contiguous, and casts its parameters."""
        head, insertion = self._head, self._insertion
        assert head is not None
        before = self._one.log_softmax
        for cast in head.casts.tolist():
            self.made[cast] = insertion.op("aten._to_copy.default", like=before, before=before, writes=[cast])
        self._hidden = head.hidden
        if head.copied != NONE:
            self._hidden = head.copied
            self.made[head.copied] = insertion.op(
                "aten.clone.default",
                like=self._one.log_softmax,
                before=self._one.log_softmax,
                reads=[head.hidden],
                writes=[head.copied],
                duration_us=self._small_us,
            )

    def _chunk_logits(self, like: int, before: int, share: float, forward: int = NONE) -> tuple[int, tuple[int, ...]]:
        """Emits the product that computes a chunk's logits."""
        head, insertion = self._head, self._insertion
        assert head is not None
        op = insertion.op(
            "aten.mm.default" if len(head.parameters) == 1 else "aten.addmm.default",
            like=like,
            before=before,
            reads=[self._hidden, *(int(storage) for storage in head.parameters)],
            writes=[insertion.next_storage],
            duration_us=head.forward_us * share,
            flops=int(head.flops * share),
            forward_op_id=forward,
        )
        logits = insertion.storage(int(self._logit_bytes * share), op)
        return logits, (logits,)

    def _reduce(self, losses: list[int], like: int, before: int) -> None:
        """Emits the reduction of the chunks' losses."""
        insertion, small = self._insertion, self._small_us
        rows_bytes = self._target_bytes // 8
        op = insertion.op(
            "aten.ne.Scalar",
            like=like,
            before=before,
            reads=[self._target],
            writes=[insertion.next_storage],
            workspace_bytes=8,
            duration_us=small,
        )
        counts = insertion.storage(rows_bytes, op)
        op = insertion.op(
            "aten.sum.default",
            like=like,
            before=before,
            reads=[counts],
            writes=[insertion.next_storage],
            workspace_bytes=8 * rows_bytes,  # booleans are summed as 8-byte integers
            duration_us=small,
        )
        insertion.free(counts, op)
        self._divisor = insertion.storage(8, op, category="activation")
        self.kept.append(self._divisor)
        op = insertion.op(
            "aten.stack.default",
            like=like,
            before=before,
            reads=losses,
            writes=[insertion.next_storage],
            duration_us=small,
        )
        stacked = insertion.storage(self._item * len(losses), op)
        op = insertion.op(
            "aten.sum.default",
            like=like,
            before=before,
            reads=[stacked],
            writes=[insertion.next_storage],
            duration_us=small,
        )
        total = insertion.storage(self._item, op)
        op = insertion.op(
            "aten.div.Tensor",
            like=like,
            before=before,
            reads=[total, self._divisor],
            writes=[self._one.loss],
            workspace_bytes=4,
            duration_us=small,
        )
        self.made[self._one.loss] = op
        for storage in (*losses, stacked, total):
            insertion.free(storage, op)
