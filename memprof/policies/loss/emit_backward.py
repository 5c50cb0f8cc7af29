"""Emits the backward operators of a chunked cross-entropy, as memprof.policies.loss.cross_entropy runs them."""

from __future__ import annotations

from memprof.policies.loss.emit import LOW, ForwardEmitter
from memprof.trace.schema import NONE


class Emitter(ForwardEmitter):
    """Emits forward and backward of one chunked cross-entropy."""

    def backward(self) -> None:
        """Emits the gradient of each chunk."""
        one, insertion, head = self._one, self._insertion, self._head
        like = before = int(one.backward[0])
        forward = self.first_forward
        if head is None:
            whole = [one.gradient]
        else:
            whole = [storage for storage in (head.of_hidden, *head.of_parameters) if storage != NONE]
        for storage in whole:
            op = insertion.op("aten.empty_like.default", like=like, before=before, forward_op_id=forward)
            if self._sums_wide() and head is not None and storage != head.of_hidden:
                self._sums[int(storage)] = insertion.storage(self._wide_bytes_of(int(storage)), op)
            else:
                self.made[int(storage)] = op
        scale_op = insertion.op(
            "aten.div.Tensor",
            like=like,
            before=before,
            reads=[storage for storage in (one.upstream, self._divisor) if storage != NONE],
            writes=[insertion.next_storage],
            duration_us=self._small_us,
            forward_op_id=forward,
        )
        # Of the loss's own type: the number of samples that divides it is a whole one.
        is_low = one.upstream != NONE and str(self._step.storages.dtype[one.upstream]) in LOW
        scale = insertion.storage(2 if is_low else self._item, scale_op)
        last = scale_op
        for rows in self.parts:
            share = rows / self.rows
            last = self._chunk_gradient(like, before, share, scale)
        insertion.free(scale, last)
        for storage, wide in self._sums.items():
            low = self._bytes_of(storage)
            op = insertion.op("aten._to_copy.default", like=like, before=before, reads=[wide], forward_op_id=forward)
            insertion.free(wide, op)
            if low == self._wide_bytes_of(storage):  # autocast's cast, through which backward goes on
                cast = insertion.storage(low // 2, op)
                op = insertion.op("aten._to_copy.default", like=like, before=before, forward_op_id=forward)
                insertion.free(cast, op)
            self.made[storage] = op

    def _sums_wide(self) -> bool:
        """Whether the head's gradients are 16 bits wide: their sums over chunks take 32."""
        return self._is_low and self._head is not None

    def _bytes_of(self, storage: int) -> int:
        return int(self._step.storages.allocated_bytes[storage])

    def _wide_bytes_of(self, storage: int) -> int:
        """Returns the bytes of a parameter's gradient in 32 bits: it has them already where autocast casts."""
        assert self._head is not None
        return self._bytes_of(storage) * (1 if len(self._head.casts) else 2)

    def _chunk_gradient(self, like: int, before: int, share: float, scale: int) -> int:
        """Emits the gradient of a chunk: its softmax, scaled in place, minus its targets' share."""
        one, insertion, head, forward = self._one, self._insertion, self._head, self.first_forward
        wide = int(self._wide_bytes * share)
        held: list[int] = []
        if head is None and not self._is_low:
            work = one.gradient  # softmax writes into its rows
            insertion.op(
                "aten.softmax.int_out",
                like=like,
                before=before,
                reads=[one.logits],
                mutates=[work],
                duration_us=self._softmax_us * share,
                forward_op_id=forward,
            )
        else:
            logits = one.logits
            if head is not None:
                logits, _ = self._chunk_logits(like, before, share, forward)
            converted = NONE
            if self._is_cast:  # softmax with another dtype, or the model, converts its input first
                op = insertion.op(
                    "aten._to_copy.default", like=like, before=before, reads=[logits], forward_op_id=forward
                )
                converted = insertion.storage(wide, op)
                if one.is_cast_by_model:
                    insertion.free(logits, op)
            op = insertion.op(
                "aten._softmax.default",
                like=like,
                before=before,
                reads=[logits if converted == NONE else converted],
                writes=[insertion.next_storage],
                duration_us=self._softmax_us * share,
                forward_op_id=forward,
            )
            work = insertion.storage(wide, op)
            held.append(work)
            is_held = head is not None and not one.is_cast_by_model
            for storage in (converted, logits if is_held else NONE):
                if storage != NONE:
                    insertion.free(storage, op)
        last = self._subtract_targets(work, like, before, share, scale)
        if head is not None:
            if self._is_cast:
                op = insertion.op(
                    "aten._to_copy.default", like=like, before=before, reads=[work], forward_op_id=forward
                )
                insertion.free(work, op)
                work = insertion.storage(int(self._logit_bytes * share), op)
                held = [work]
            return self._products(work, held, like, before, share)
        if self._is_low:
            last = insertion.op(
                "aten.copy_.default",
                like=like,
                before=before,
                reads=held,
                mutates=[one.gradient],
                duration_us=self._small_us,
                forward_op_id=forward,
            )
            insertion.free(work, last)
        return last

    def _subtract_targets(self, work: int, like: int, before: int, share: float, scale: int) -> int:
        """Emits the small operators on one number per row."""
        insertion, forward, small = self._insertion, self.first_forward, self._small_us
        index_bytes, share_bytes = int(self._target_bytes * share), int(self._share_bytes * share)
        held: list[int] = []
        for name, size, workspace in (
            ("aten.ne.Scalar", index_bytes // 8, 8),
            ("aten.where.self", index_bytes, 0),
            ("aten.mul.Tensor", share_bytes, share_bytes),  # the booleans as floats
            ("aten.neg.default", share_bytes, 0),
        ):
            if name == "aten.neg.default":
                insertion.op(
                    "aten.mul_.Tensor",
                    like=like,
                    before=before,
                    reads=held[-1:],
                    mutates=[work],
                    duration_us=small,
                    forward_op_id=forward,
                )
            op = insertion.op(
                name,
                like=like,
                before=before,
                reads=[self._target, *([scale] if name == "aten.mul.Tensor" else [])],
                writes=[insertion.next_storage],
                workspace_bytes=workspace,
                duration_us=small,
                forward_op_id=forward,
            )
            held.append(insertion.storage(size, op))
        last = insertion.op(
            "aten.scatter_add_.default",
            like=like,
            before=before,
            reads=held[1:],
            mutates=[work],
            duration_us=small,
            forward_op_id=forward,
        )
        for storage in held:
            insertion.free(storage, last)
        return last

    def _products(self, work: int, held: list[int], like: int, before: int, share: float) -> int:
        """Emits the products that compute the head's gradients."""
        head, insertion = self._head, self._insertion
        assert head is not None
        outputs = [int(storage) for storage in (head.of_hidden, *head.of_parameters) if storage != NONE]
        matrix = int(head.parameters[0])
        last = insertion.next_op
        products = [storage for storage in outputs if storage != head.of_hidden][:1]
        count = len(products) + (head.of_hidden != NONE)
        for output in outputs:
            is_product = output == head.of_hidden or output in products
            if is_product and output in self._sums:
                op = insertion.op(
                    "aten.mm.default",
                    like=like,
                    before=before,
                    reads=[work, self._hidden],
                    writes=[insertion.next_storage],
                    duration_us=head.backward_us * share / count,
                    flops=int(head.flops * share),
                    forward_op_id=self.first_forward,
                )
                part = insertion.storage(self._wide_bytes_of(output) // 2, op)
                last = insertion.op(
                    "aten.add_.Tensor",
                    like=like,
                    before=before,
                    reads=[part],
                    mutates=[self._sums[output]],
                    # A processor converts the whole operand first.
                    workspace_bytes=0 if self._step.is_on_device() else self._wide_bytes_of(output),
                    duration_us=self._small_us,
                    forward_op_id=self.first_forward,
                )
                insertion.free(part, last)
                continue
            if is_product:
                last = insertion.op(
                    "aten.mm.out" if output == head.of_hidden else "aten.addmm_.default",
                    like=like,
                    before=before,
                    reads=[work, matrix if output == head.of_hidden else self._hidden],
                    mutates=[output],
                    duration_us=head.backward_us * share / count,
                    flops=int(head.flops * share),
                    forward_op_id=self.first_forward,
                )
                continue
            op = insertion.op(
                "aten.sum.dim_IntList",
                like=like,
                before=before,
                reads=[work],
                writes=[insertion.next_storage],
                duration_us=self._small_us,
                forward_op_id=self.first_forward,
            )
            row_bytes = self._wide_bytes_of(output) if output in self._sums else self._bytes_of(output)
            row = insertion.storage(row_bytes, op)
            last = insertion.op(
                "aten.add_.Tensor",
                like=like,
                before=before,
                reads=[row],
                mutates=[self._sums.get(output, output)],
                duration_us=self._small_us,
                forward_op_id=self.first_forward,
            )
            insertion.free(row, last)
        for storage in held:
            insertion.free(storage, last)
        return last
