"""Detects from Python frames whether a job saves or loads a checkpoint, without replacing any torch function."""

from __future__ import annotations

from types import CodeType, FrameType

from memprof.trace.files.spool import LOADING, SAVING

#: Checkpoint functions by the end of their file's name; a trailing * matches any function name with that prefix.
_FUNCTIONS: dict[str, dict[str, int]] = {
    "torch/serialization.py": {"save": SAVING, "load": LOADING},
    "torch/jit/_serialization.py": {"save": SAVING, "load": LOADING},
    "torch/nn/modules/module.py": {"state_dict": SAVING, "load_state_dict": LOADING},
    "torch/optim/optimizer.py": {"state_dict": SAVING, "load_state_dict": LOADING},
    "torch/distributed/checkpoint/state_dict_saver.py": {"*": SAVING},
    "torch/distributed/checkpoint/state_dict_loader.py": {"*": LOADING},
    "torch/distributed/checkpoint/state_dict.py": {"get_*": SAVING, "set_*": LOADING},
    "safetensors/torch.py": {"save*": SAVING, "load*": LOADING},
    "memprof/recorder/dry/files.py": {"save": SAVING, "load": LOADING},  # replaces torch.save and torch.load
}
_FILES = {name.rpartition("/")[2] for name in _FUNCTIONS}

#: The tensor method that `copy.deepcopy` calls.
COPYING = "__deepcopy__"
_COPY_FILE = "copy.py"
_BETWEEN = ("torch", "memprof")
_TENSOR_FILES = ("torch/_tensor.py", "torch/nn/parameter.py")


def storing_phase(code: CodeType) -> int:
    """Returns the phase of a function: SAVING or LOADING of ``trace.spool``, -1 for all others."""
    file = code.co_filename.replace("\\", "/")
    if file.rpartition("/")[2] not in _FILES:
        return -1
    functions = next((names for end, names in _FUNCTIONS.items() if file.endswith(f"/{end}")), {})
    for name, phase in functions.items():
        if code.co_name == name or (name.endswith("*") and code.co_name.startswith(name[:-1])):
            return phase
    return -1


def copies_state_dict(frame: FrameType | None) -> bool:
    """Whether a stack is that of ``copy.deepcopy(model.state_dict())``, judging by how `copy` reaches its tensors.

    An ordered dict is rebuilt by ``_reconstruct``, which copies its values itself; a module's tensors are in plain
    dicts, which have their own function.
    """
    while frame is not None and not _is_of(frame, COPYING, _TENSOR_FILES):
        frame = frame.f_back
    # A tensor subclass goes through torch's overrides, and in a dry run through memprof's.
    while frame is not None and not _is_copying(frame) and any(each in frame.f_code.co_filename for each in _BETWEEN):
        frame = frame.f_back
    names = []
    while frame is not None and _is_copying(frame):
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[:2] == ["deepcopy", "_reconstruct"] and names.count("_reconstruct") == 1


def _is_copying(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "copy" and frame.f_code.co_filename.endswith(_COPY_FILE)


def _is_of(frame: FrameType, name: str, files: tuple[str, ...]) -> bool:
    return frame.f_code.co_name == name and frame.f_code.co_filename.replace("\\", "/").endswith(files)
