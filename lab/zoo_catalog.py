"""Every script of the zoo: how it is run, how its steps are cut, and what is excepted for which reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ZOO = Path(__file__).parent / "zoo"


@dataclass(frozen=True)
class Case:
    """One script with its arguments.

    Attributes:
        script: File name in the zoo, without ``.py``.
        arguments: Command-line arguments.
        updates: Optimizer updates in one step; 0 where the script has no optimizer.
        cut: What ends a step: an optimizer ``update``, an outermost module ``call`` (scripts that update by hand),
            or nothing at all (``never``: the run is one window).
        steps: The steps recorded whole when two are skipped and three recorded.
        inexact: Why the peak cannot equal the one of another process to the byte; empty where it must.
        unknown: Why more than 1 % of the bytes at the peak may be uncategorized; empty where they may not.
        is_slow: Run by `make test-all` only: other scripts cover most of the same.
        noise: Lines with this text on stderr are left out of the comparison; each has its reason in the catalog.
    """

    script: str
    arguments: tuple[str, ...] = ()
    updates: int = 1
    cut: Literal["update", "call", "never"] = "update"
    steps: tuple[int, ...] = (2, 3, 4)
    inexact: str = ""
    unknown: str = ""
    noise: str = ""
    is_slow: bool = False

    @property
    def name(self) -> str:
        """The script with its arguments, as a test's name."""
        return "-".join([self.script, *(argument.strip("-") for argument in self.arguments)])

    @property
    def path(self) -> Path:
        """Where the script lies."""
        return ZOO / f"{self.script}.py"


CASES = (
    # Plain supervised training
    Case("models", ("depthwise_convnet",), is_slow=True),
    Case("gru_seq2seq", is_slow=True),
    Case("mixture_of_experts", is_slow=True),
    Case("packed_sequences", is_slow=True),
    Case("models", ("siamese",), is_slow=True),
    Case("translation_transformer", is_slow=True),
    Case("unet", is_slow=True),
    Case("vae", unknown="the test set is held, and not touched before the recording is over", is_slow=True),
    Case("mnist"),
    # The optimizer's side
    Case("loops", ("gradient_accumulation",), is_slow=True),
    Case("techniques", ("optimizer_variants", "fused"), is_slow=True),
    Case("techniques", ("optimizer_variants", "foreach"), is_slow=True),
    Case("techniques", ("optimizer_variants", "loop"), is_slow=True),
    Case("loops", ("optimizer_in_backward",), updates=6, is_slow=True),
    Case("loops", ("scheduler_and_eval",), is_slow=True),
    Case(
        "sparse_embedding",
        updates=2,
        inexact="with any dispatch mode on, autograd clones a sparse gradient that it would else take over",
        is_slow=True,
    ),
    Case("time_sequence_lbfgs", is_slow=True),
    Case("techniques", ("weight_averages",), is_slow=True),
    Case("techniques", ("parametrized_weights",), is_slow=True),
    Case("techniques", ("finetune",), is_slow=True),
    # Several models
    Case("dcgan", updates=2),
    Case("loops", ("wgan",), updates=6, is_slow=True),
    Case("loops", ("two_models_in_turn",), updates=2, is_slow=True),
    Case("actor_critic", is_slow=True),
    Case("reinforce", is_slow=True),
    # Autograd and dispatch
    Case("techniques", ("activation_checkpointing",)),
    Case("techniques", ("activation_checkpointing", "reentrant"), is_slow=True),
    Case("techniques", ("selective_checkpointing",), is_slow=True),
    Case("techniques", ("autocast_bf16",), is_slow=True),
    Case("techniques", ("custom_function",)),
    Case("techniques", ("gradient_penalty",), is_slow=True),
    Case("own_dispatch_mode"),
    # The profiler of the script takes over in step 3, and is still on when step 4 begins. It warns of memory older
    # than itself, unless the allocator knows of it, which it does once a recorder has been there.
    Case("own_profiler", steps=(4, 5), noise="Memory block of unknown size was allocated before", is_slow=True),
    Case("caught_errors", is_slow=True),
    Case("techniques", ("compiled", "aot_eager"), is_slow=True),
    Case("techniques", ("compiled", "inductor"), is_slow=True),
    # Who calls what, and from where
    Case("models", ("submodules_called",), is_slow=True),
    Case("dataloader_workers", unknown="the data set is held by the trainer, and touched in the workers only"),
    Case(
        "threaded_loader",
        inexact="how far the script's thread runs ahead differs from run to run",
        unknown="batches made by another thread have no operator, and those not yet used no purpose",
        is_slow=True,
    ),
    # Scripts without an optimizer
    Case("loops", ("manual_update",), updates=0, cut="call"),
    Case(
        "word_language_model",
        updates=0,
        cut="call",
        unknown="the validation set is held, and not touched before the recording is over",
        is_slow=True,
    ),
    Case(
        "loops",
        ("functional_training",),
        updates=0,
        cut="never",
        inexact="one window: there are no steps to compare",
        is_slow=True,
    ),
    Case("loops", ("inference_only",), updates=0, cut="never", inexact="one window: there are no steps to compare"),
)
