"""Cases that only `make test-all` runs, because `make test` already covers the same promise with another case.

Each file maps to substrings of its test names. A slow test without a faster equivalent carries the slow marker itself.
"""

from __future__ import annotations

SLOW_CASES: dict[str, tuple[str, ...]] = {
    "tests/conformance/odd/test_odd_jobs.py": ("closes_descriptors-light",),
    "tests/conformance/test_conformance.py": ("from_cause", "MALLOC_ARENA_MAX= runs_out_of_memory.py retried"),
    "tests/launch/test_host.py": ("children-0.02",),
    "tests/launch/test_out_of_memory.py": ("[forward]", "[optimizer]"),
    "tests/policies/test_accumulate.py": ("agree[unet",),
    "tests/policies/test_checkpoint.py": (
        "byte[vit",
        "byte[unet",
        "byte[resnet-segments",
        "byte[lstm",
        "byte[shared-]",
    ),
    "tests/policies/test_composition.py": (
        "measured_as_predicted[vit]",
        "measured_as_predicted[unet]",
        "measured_as_predicted[shared]",
        "moved_too[resnet1]",
        "moved_too[unet3]",
    ),
    "tests/policies/test_compress.py": ("bar[vit", "bar[unet", "tolerance[vit]", "tolerance[resnet]"),
    "tests/policies/test_loss.py": ("peak[unet]", "peak[lstm]", "rounding[lstm", "rounding[shared-True"),
    "tests/policies/test_optimizer.py": ("each_other[SGD Nesterov-loop", "each_other[AdamW-loop", "peak[unet"),
    "tests/policies/test_precision.py": ("one[vit", "one[resnet", "one[lstm", "rounding[lstm"),
    "tests/policies/test_remat.py": ("budget_holds[eq-class",),
    "tests/policies/test_shard_apply.py": ("whole_one[split-0]",),
    "tests/policies/test_swap.py": (
        "exact[resnet-settings5]",
        "exact[gpt-settings4]",
        "exact[unet",
        "bit[gpt-settings6]",
        "bit[gpt-settings1]",
        "bit[unet",
        "bit[shared-settings5]",
    ),
    "tests/policies/test_unseen_jobs.py": ("peak[normalized", "peak[products", "peak[adversarial-precision"),
    "tests/real/test_real_scripts.py": ("graph_net", "accelerate_loop"),
    "tests/recorder/test_device_backward.py": ("recorded[arguments2]",),
    "tests/recorder/test_dry_policies.py": ("real_run[swap-gpt]", "real_run[loss of a head-gpt]"),
    "tests/recorder/test_zoo.py": (
        "[activation_checkpointing]",
        "[custom_function]",
        "[dataloader_workers]",
        "[dcgan]",
        "[manual_update]",
    ),
}


def is_slow_case(name: str) -> bool:
    """Tells whether a test, by pytest's name for it, is left to `make test-all`."""
    file, _, case = name.partition("::")
    return any(words in case for words in SLOW_CASES.get(file, ()))
