"""Signals, ends, forks and spawns."""

from __future__ import annotations

import signal

from tests.conformance.odd.jobs import killed_late, odd

PROCESSES = [
    *odd(
        "signals",
        "timer processor_timer child_ends children_ignored waits wakes_up pipe_is_ignored dumps to_thread stops "
        "own_group raised_in_forward timer_in_steps wakeup_in_steps",
        alarm=-signal.SIGALRM,
        pipe_kills=-signal.SIGPIPE,
        raises=1,
        inherited=-signal.SIGINT,
        own_session=8,
        checkpoint_on_term=85,
    ),
    *odd(
        "exits",
        "exits_in_thread fails_in_thread own_thread_hook at_exit finalizers own_unraisable_hook daemon_alive "
        "generator_left_open recursion_in_forward memory_error_in_forward models_at_exit trains_at_exit "
        "trains_after_main",
        exits_large=5,
        exits_with_object=1,
        exits_with_pair=1,
        exits_with_subclass=9,
        leaves_at_once=5,
        leaves_in_thread=6,
        own_except_hook=1,
        except_hook_fails=1,
        except_hook_exits=17,
        thread_outlives_main=3,
        aborts=-signal.SIGABRT,
        recursion=1,
        memory_error=1,
        keyboard=-signal.SIGINT,
        notes=1,
        unprintable=1,
        surrogate=1,
        exits_in_hook=21,
        leaves_in_step=22,
        aborts_in_step=-signal.SIGABRT,
        hook_with_training=1,
    ),
    *killed_late(odd("exits", "", killed_by_child=-signal.SIGTERM)),
    *odd(
        "children",
        "forks daemonises leaves_orphan execs_itself execs_after_training execs_in_training empty_environment "
        "own_descriptors new_session spawns times_out children_flags fork spawn forkserver manager futures "
        "trains_in_pool shares_model trains_in_fork forks_in_step forks_in_backward fork_ends_in_order loads "
        "worker_killed",
        execs_other=4,
        dies_with_children=-signal.SIGKILL,
        loads_and_fails=1,
    ),
]
