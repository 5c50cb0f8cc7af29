"""Puts the virtual extension in place of Transformer Engine's compiled one, which needs CUDA's libraries."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.compiled.late_import import LateImport
from memprof.virtual.engine.names import ENUMERATIONS

_PACKAGE, _EXTENSION = "transformer_engine", "transformer_engine_torch"
_ATTENTION = "pytorch.attention.dot_product_attention"
#: With this variable, the package loads no library when it is imported.
_LOADS_NOTHING = "NVTE_PROJECT_BUILDING"
#: Version of cuBLASLt that is reported.
_CUBLASLT = 130_100


def install(refuse: Callable[[str], Any]) -> None:
    """Waits for the job's import of Transformer Engine, where its Python code is installed.

    Args:
        refuse: Ends the job with a message.
    """
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        return
    folder = Path(next(iter(found.submodule_search_locations)))

    def replace(module: ModuleType) -> None:
        common: Any = module
        common.load_framework_extension = lambda _framework: sys.modules.setdefault(
            _EXTENSION, _extension(folder, refuse)
        )

    if LateImport(folder, {f"{_PACKAGE}.common": replace}).install():
        os.environ[_LOADS_NOTHING] = "1"
        LateImport(folder.joinpath(*_ATTENTION.split(".")), {f"{_PACKAGE}.{_ATTENTION}.utils": _accept_fakes}).install()


def _accept_fakes(module: Any) -> None:
    """Makes the choice of an attention kernel treat tensors of the dry run as torch's own."""
    choose = module.get_attention_backend

    @wraps(choose)
    def get_attention_backend(attention_params: Any) -> Any:
        if attention_params.qkv_type is FakeTensor:
            attention_params.qkv_type = torch.Tensor
        return choose(attention_params)

    module.get_attention_backend = get_attention_backend


def _extension(folder: Path, refuse: Callable[[str], Any]) -> ModuleType:
    """Returns the module: what is not modelled of the names that the package reads ends the job when it is called."""
    from memprof.virtual.engine.operators import FUNCTIONS  # lazy: only jobs that import the package need it

    module: Any = ModuleType(_EXTENSION)
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("pytorch/**/*.py"))
    for name in sorted(set(re.findall(r"\btex\.([A-Za-z]\w*)", text))):
        setattr(module, name, _missing(name, refuse))
    for name, value in {
        **ENUMERATIONS,
        **FUNCTIONS,
        "get_cudnn_version": torch.backends.cudnn.version,
        "get_cublasLt_version": lambda: _CUBLASLT,
    }.items():
        setattr(module, name, value)
    module.__getattr__ = lambda name: _absent(name, refuse)
    found: ModuleType = module
    return found


def _absent(name: str, refuse: Callable[[str], Any]) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name, refuse)


def _missing(name: str, refuse: Callable[[str], Any]) -> Any:
    """Returns what stands for a function, or a class, that is not modelled."""

    def call(*_: Any, **__: Any) -> Any:
        refuse(f"{_EXTENSION}.{name} cannot be dry-run: what it allocates is not modelled. Choose another kernel.")

    return type(name, (), {"__new__": call}) if name[0].isupper() else call
