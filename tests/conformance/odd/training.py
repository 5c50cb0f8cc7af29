"""Hooks, modes, loops, threads, and introspection: in groups that run in one process each, for speed.

A group records every step of all its functions; the single ones need their own process.
"""

from __future__ import annotations

from tests.conformance.odd.jobs import counting, odd, together

TRAINING = [
    *together(
        "hooks",
        "global_module_hooks module_hooks hooks_removed_inside hook_fails tensor_hooks graph_seen",
        "saved_tensors saved_on_cpu saved_hooks_forbidden saved_mutated optimizer_hooks",
        "dispatch_mode_fails own_function patches patches_in_window patched_instance code_seen counts_own_calls",
    ),
    *counting(odd("hooks", "dispatch_mode dispatch_mode_for_ever function_mode function_mode_for_ever")),
    *together(
        "modes",
        "anomaly deterministic deterministic_warns default_dtype meta_model gradients_off inference",
        "scaled nested sparse quantised complex_numbers subclass_functions subclass_dispatch",
        "subclass_parameter functions_transformed forward_mode parametrized scripted symbolic",
    ),
    *counting(odd("looking", "objects")),
    *odd("modes", "default_device one_thread exported fake_mode", anomaly_found=1),
    *together(
        "loops",
        "lbfgs closure_fails adversarial no_optimizer no_module accumulates",
        "optimizer_made_again model_replaced nothing_to_do backward_twice penalised in_backward own_optimizer",
        "scheduled freezes data_replaced twins evaluates checkpointed frozen_steps",
    ),
    *odd("loops", "distributed"),
    *together(
        "threads",
        "hogwild two_models pool steps_in_pool backward_elsewhere",
        "graph_in_threads coroutines fed parallel_backward timers",
    ),
    *odd("threads", "local_state"),
    *together(
        "looking",
        "traces profiles traces_threads c_profile trace_malloc collects",
        "without_collector leak_check warning_catch main_module pickles_main descriptors random_streams",
    ),
    *odd(
        "looking",
        "all_collected stacks dump_later pickles_in_training threads_seen seeds_in_step audits warning_errors "
        "context logs",
    ),
]
