"""Why checkpoint is refused: the sentences that a prediction and a run share."""

from __future__ import annotations


def changes_in_place(name: str) -> str:
    """Returns the sentence for a module whose forward cannot run again.

    Args:
        name: Its qualified name, "" for the model.
    """
    return (
        f"{name or 'The model'} changes an input or a buffer of its own in place, so its forward cannot run again; "
        "choose modules inside or around it that do not."
    )
