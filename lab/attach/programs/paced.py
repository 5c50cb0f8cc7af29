"""Runs a script so that there is time to attach to it: paced.py SCRIPT ARGUMENTS.

A step waits, on Python lines, until the file that ``LAB_DONE`` names is there, for ``LAB_PACE`` seconds at most; the
third writes the process id to the file that ``LAB_READY`` names. The last line is a digest of the parameters of all
optimizers and of the states of the random generators.
"""

import atexit
import hashlib
import os
import random
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

_READY, _DONE = Path(os.environ["LAB_READY"]), Path(os.environ["LAB_DONE"])
_PACE = float(os.environ.get("LAB_PACE", "2.5"))
_SELF = os.getpid()
_READY_AT = 3
_steps = 0
_parameters = {}


def ready(pid=None):
    """Says that this process, or another, may be attached to."""
    half = _READY.with_suffix(".half")
    half.write_text(str(pid or os.getpid()))
    half.rename(_READY)


def step(*_):
    """Ends a step: writes that the process may be attached to, and waits."""
    global _steps  # noqa: PLW0603 - one count per process
    if os.getpid() != _SELF:
        return
    _steps += 1
    if _steps == _READY_AT:
        ready()
    end = time.monotonic() + (_PACE if _steps >= _READY_AT else 0)
    while time.monotonic() < end and not _DONE.exists():
        time.sleep(0.005)


def digest(parameters=()):
    """Returns a digest of parameters and of the random generators."""
    found = hashlib.sha256(repr(random.getstate()).encode())
    found.update(torch.get_rng_state().numpy().tobytes())
    for parameter in parameters:
        found.update(parameter.detach().to_dense().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _after_update(optimizer, *_):
    for group in optimizer.param_groups:
        _parameters.update((id(parameter), parameter) for parameter in group["params"])
    step()


def _last():
    if os.getpid() == _SELF:
        plain = [each for each in _parameters.values() if type(each) is torch.nn.Parameter]
        print("digest", digest(plain), flush=True)


if __name__ == "__main__":
    sys.modules["paced"] = sys.modules["__main__"]
    atexit.register(_last)
    random.seed(1)
    if os.environ.get("LAB_STEP") == "call":
        register_module_forward_hook(step)
    elif os.environ.get("LAB_STEP") != "own":
        register_optimizer_step_post_hook(_after_update)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
