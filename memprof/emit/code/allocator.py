"""Options of the CUDA caching allocator, set in the environment variable that torch reads."""

from __future__ import annotations

from memprof.emit.code.pieces import Code, text_of
from memprof.policies.allocator.policy import OLD_VARIABLE, VARIABLE, Allocator


def options_text(policy: Allocator) -> str:
    """Returns the options in torch's syntax: ``expandable_segments:True,max_split_size_mb:128``."""
    return ",".join(f"{key}:{value}" for key, value in policy.options().items())


def allocator_code(policy: Allocator) -> Code:
    """Returns the code of an allocator policy, which runs when the generated module is imported."""
    return Code(
        imports=("import os",),
        helpers=(
            (
                "# Torch reads this when the first CUDA tensor is created, under its old name if that is set.\n"
                f'_NAME = "{OLD_VARIABLE}" if "{OLD_VARIABLE}" in os.environ else "{VARIABLE}"\n'
                f"_OPTIONS = (os.environ.get(_NAME), {text_of(options_text(policy))})\n"
                'os.environ[_NAME] = ",".join(each for each in _OPTIONS if each)'
            ),
        ),
        notes=(
            (
                "allocator: torch reads its options when the first CUDA tensor is created, so import this file before "
                "that; or "
                f"start the job with {VARIABLE}={options_text(policy)}."
            ),
        ),
    )
