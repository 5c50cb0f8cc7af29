"""Imports what every dry-run rank imports, in the process from which ranks are forked."""

from __future__ import annotations

from importlib import import_module

#: Modules that a dry run imports only when it begins.
_LAZY = (
    "memprof.recorder.dry.run",
    "memprof.machines.card",
    "memprof.policies.allocator.policy",
    "memprof.recorder.dry.compiling.compiled_regions",
    "memprof.recorder.dry.device.virtual_device",
    "memprof.recorder.dry.mode",
    "memprof.recorder.dry.sequences",
    "memprof.recorder.dry.values.numbers",
    "memprof.recorder.dry.ranks.objects",
    "memprof.recorder.dry.routing",
    "memprof.recorder.dry.subclasses",
    "torch.testing._internal.distributed.fake_pg",
)


def import_all() -> None:
    """Imports the modules of a dry run and those of torch that they need, which takes a second."""
    for name in _LAZY:
        import_module(name)
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode()  # imports the rest
