"""Checks that the job was started with the allocator's options, which torch reads once."""

from __future__ import annotations

import os

from memprof.policies.allocator.policy import OLD_VARIABLE, VARIABLE, Allocator, parse_options
from memprof.policies.runtime.job import Job


def apply(job: Job, policy: Allocator) -> None:
    """Changes nothing; adds notes where the environment lacks an option or the device has no such allocator.

    Torch reads the variable when its allocator is first used; changing it in a running job would affect child
    processes, not this job.
    """
    name = OLD_VARIABLE if OLD_VARIABLE in os.environ else VARIABLE
    present = {key: value.lower() for key, value in parse_options(os.environ.get(name, "")).items()}
    missing = {key: value for key, value in policy.options().items() if present.get(key) != value.lower()}
    if missing:
        text = ",".join(f"{key}:{value}" for key, value in missing.items())
        job.notes.append(
            f"The allocator's options are not in effect: torch reads them at its start, so start the job with "
            f"{name}={text}, or by 'memprof record --plan'."
        )
    elif job.device.type != "cuda":
        job.notes.append(f"The allocator's options have no effect on {job.device.type}: they apply to CUDA only.")
