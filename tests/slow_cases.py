"""Cases that only `make test-all` runs, because `make test` already covers the same promise with another case.

Each file maps to substrings of its test names. A slow test without a faster equivalent carries the slow marker itself.
"""

from __future__ import annotations

SLOW_CASES: dict[str, tuple[str, ...]] = {
    "tests/cli/test_fit.py": ("page_ends_with",),
    "tests/cli/test_suggest.py": ("compiled_run_is", "times_are_those_of_the_machine"),
    "tests/conformance/odd/test_odd_jobs.py": ("closes_descriptors-light", "all streams closed"),
    "tests/conformance/test_conformance.py": (
        "from_cause",
        "MALLOC_ARENA_MAX= runs_out_of_memory.py retried",
        "memprof[warns_in_step",
        "memprof[runs_threads",
        "memprof[looks_at_stack",
        "memprof[looks_at_modules",
        "memprof[handles_signals_in_step",
        "memprof[ends_in_step.py exit",
        "memprof[fails_in_optimizer",
    ),
    "tests/conformance/test_higher_order.py": ("alone[quick-remat",),
    "tests/conformance/test_light.py": ("looks_at_modules",),
    "tests/conformance/test_profilers.py": ("in_thread record", "in_backward light"),
    "tests/conformance/test_signal_errors.py": ("light-20",),
    "tests/fuzz/test_recordings.py": ("sentence[3]", "sentence[4]", "sentence[5]"),
    "tests/integrations/test_lightning.py": ("goes_with_the_older_name",),
    "tests/launch/test_after_window.py": ("later_leaves_a_whole_recording[killed",),
    "tests/launch/test_file_size_limit.py": ("one_file_cannot_hold", "where_no_step_fits"),
    "tests/launch/test_fit.py": ("written_once_it_was_measured", "job_that_fits"),
    "tests/launch/test_fit_dry.py": ("is_not_what_was_recorded",),
    "tests/launch/test_host.py": ("children-0.02",),
    "tests/launch/test_make_fit.py": ("computes_the_same[checkpoint]",),
    "tests/launch/test_many_ranks.py": ("names0", "goes_to_an_address"),
    "tests/launch/test_out_of_memory.py": ("[forward]", "[optimizer]", "job_that_goes_on", "after_the_window"),
    "tests/launch/test_parent.py": ("shorter_than_the_skip", "stop_ends_the_job", "SystemExit(7)"),
    "tests/launch/test_plan_copies.py": ("copies_trained_in_turn",),
    "tests/launch/test_steps_differ.py": (
        "every_step[lengths-0.85",
        "every_step[last-0.8",
        "every_step[last-0.9",
    ),
    "tests/planners/test_chain.py": ("every_answer_is_true[resnet]",),
    "tests/planners/test_checkmate.py": ("ends_in_time[resnet]", "never_slower[0]"),
    "tests/planners/test_find.py": ("are_replayed[checkmate]", "are_replayed[auto]"),
    "tests/planners/test_mixture.py": (
        "choice_is_faster[85-gpt]",
        "choice_is_faster[70-",
        "choice_is_faster[60-resnet]",
        "accepts_is_faster[80-resnet]",
        "accepts_is_faster[60-gpt]",
        "with_a_reason[gpt]",
    ),
    "tests/planners/test_promises.py": ("promises[checkmate-residual]", "promises[auto-residual]"),
    "tests/planners/test_scaling.py": ("of_a_third[shared", "of_a_third[lstm"),
    "tests/planners/test_space.py": ("never_slower[resnet]",),
    "tests/policies/test_accumulate.py": ("agree[unet",),
    "tests/policies/test_checkpoint.py": (
        "byte[vit",
        "byte[unet",
        "byte[resnet-segments",
        "byte[lstm",
        "byte[shared-]",
    ),
    "tests/policies/test_checkpoint_beside_own.py": ("its_input[modules0]", "its_input[modules1]"),
    "tests/policies/test_compile.py": ("rounding[0.1",),
    "tests/policies/test_composition.py": (
        "measured_as_predicted[vit]",
        "measured_as_predicted[unet]",
        "measured_as_predicted[shared]",
        "moved_too[resnet1]",
        "moved_too[unet3]",
    ),
    "tests/policies/test_compress.py": ("bar[vit", "bar[unet", "tolerance[vit]", "tolerance[resnet]"),
    "tests/policies/test_dropped.py": ("compile layers",),
    "tests/policies/test_frozen_weights.py": ("predicted[True-policies1]", "predicted[False-policies2]"),
    "tests/policies/test_interval.py": ("lie_between[vit]",),
    "tests/policies/test_kept_calls.py": ("byte[gpt-flags1]", "byte[unet"),
    "tests/policies/test_loss.py": ("peak[unet]", "peak[lstm]", "rounding[lstm", "rounding[shared-True"),
    "tests/policies/test_optimizer.py": ("each_other[SGD Nesterov-loop", "each_other[AdamW-loop", "peak[unet"),
    "tests/policies/test_precision.py": ("one[vit", "one[resnet", "one[lstm", "rounding[lstm"),
    "tests/policies/test_precision_processors.py": (
        "predicted[resnet-bf16",
        "every_level[AVX512_CORE_BF16]",
        "without[AVX512_CORE_BF16]",
    ),
    "tests/policies/test_remat.py": ("budget_holds[eq-class",),
    "tests/policies/test_shard_apply.py": ("whole_one[split-0]", "whole_one[split-1]", "was_predicted[flags2"),
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
    "tests/real/test_real_scripts.py": (
        "graph_net",
        "accelerate_loop",
        "on_a_card[lightning_net]",
        "found_and_met[lightning_net]",
    ),
    "tests/real_gpus/test_real_gpus.py": ("[decoder_forward]",),
    "tests/recorder/test_device_backward.py": ("recorded[arguments2]",),
    "tests/recorder/test_dry.py": ("is_told_of_it[2]",),
    "tests/recorder/test_dry_policies.py": ("real_run[swap-gpt]", "real_run[loss of a head-gpt]"),
    "tests/recorder/test_dry_replicas.py": ("find_unused_parameters"),
    "tests/recorder/test_dry_values.py": (
        "its_length[cpu-torch.inference_mode",
        "its_length[cuda-torch.no_grad",
        "real_run[40]",
    ),
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
