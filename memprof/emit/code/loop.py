"""The training loop for the emitted code, shown in the text at its top."""

from __future__ import annotations

#: Heading of the loop; tests find it by this line.
INTRODUCTION = "The loop, with loss_of(model, batch) for your forward and loss:"


def loop_lines(*, parts: int, has_scaler: bool) -> list[str]:
    """Returns the lines of the loop, indented by 4."""
    lines = ["for batch in loader:", "    optimizer.zero_grad()"]
    loss, backward, indent = "loss", "backward()", "    "
    if parts > 1:
        lines.append("    for part, share in micro_batches(batch):")
        indent, backward = "        ", "backward(torch.full_like(loss, share))"
    if has_scaler:
        loss = "scaler.scale(loss)"
    lines.append(f"{indent}loss = loss_of(model, {'part' if parts > 1 else 'batch'})")
    lines.append(f"{indent}{loss}.{backward}")
    lines += ["    scaler.step(optimizer)", "    scaler.update()"] if has_scaler else ["    optimizer.step()"]
    return [f"    {line}" for line in lines]
