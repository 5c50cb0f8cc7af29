"""Swapping through torch's saved_tensors_hooks and optimizer hooks, one copy at a time."""

from __future__ import annotations

from memprof.emit.code.pieces import MODULES, MODULES_IMPORTS, Code, call, expressions, list_of, text_of
from memprof.policies.swap.policy import Swap

_DISK = '''
class _Disk:
    """A file without a name, deleted with the process; storages in host memory are written to it and read back."""

    device_type = "cpu"

    def __init__(self, folder):
        self.file = tempfile.TemporaryFile(buffering=0, dir=folder)
        self.end, self.free = 0, {}

    def send(self, storage):
        """Writes a storage; returns its place."""
        size = storage.nbytes()
        if self.free.get(size):
            offset = self.free[size].pop()
        else:
            offset, self.end = self.end, self.end + size
        left = memoryview(_bytes_of(storage).numpy())
        self.file.seek(offset)
        while left:
            left = left[self.file.write(left) :]
        return offset, size

    def fetch(self, place):
        """Reads the data of a place into a new storage."""
        storage = torch.UntypedStorage(place[1])
        left = memoryview(_bytes_of(storage).numpy())
        self.file.seek(place[0])
        while left:
            left = left[self.file.readinto(left) :]
        return storage

    def forget(self, place):
        """Frees a place."""
        self.free.setdefault(place[1], []).append(place[0])
'''

_HOST = '''
class _Host:
    """Pinned host memory; storages of a CUDA device are copied to it and back, on the compute stream."""

    device_type = "cuda"

    def send(self, storage):
        """Copies a storage out; returns its place."""
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        host.copy_(_bytes_of(storage), non_blocking=True)
        return host, storage.device

    def fetch(self, place):
        """Copies the data of a place into a new storage."""
        host, device = place
        return torch.empty(len(host), dtype=torch.uint8, device=device).copy_(host, non_blocking=True).untyped_storage()

    def forget(self, place):
        """Frees a place: torch's own allocator of pinned memory waits for the copies."""
'''

_BYTES_OF = '''
def _bytes_of(storage):
    """Returns a whole storage as a row of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
'''

_SAVED = '''
class _Moved:
    """One moved storage; once it was needed, it stays in memory until autograd frees it."""

    def __init__(self, storage, carrier):
        self.original, self.storage = weakref.ref(storage), None
        self.carrier, self.place = carrier, carrier.send(storage)

    def restored(self):
        """Returns the storage, copied back if it was freed."""
        storage = self.storage if self.storage is not None else self.original()
        if storage is None:
            storage = self.storage = self.carrier.fetch(self.place)
        return storage

    def __del__(self):
        if hasattr(self, "place"):
            self.carrier.forget(self.place)


class _SavedElsewhere:
    """Moves what modules save for backward, except small storages, parameters, buffers and the model's inputs."""

    def __init__(self, model, carrier, minimum_bytes):
        self.model, self.carrier, self.minimum_bytes = model, carrier, max(minimum_bytes, 1)
        self.moved, self.staying = weakref.WeakValueDictionary(), set()
        model.register_forward_pre_hook(self.note_staying, with_kwargs=True)

    def note_staying(self, model, args, kwargs):
        """Records which storages stay in memory anyway."""
        device = next(model.parameters()).device.type
        if device != self.carrier.device_type:
            raise ValueError(f"The plan moves tensors from a {self.carrier.device_type} device, not {device}.")
        given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        held = (*model.parameters(), *model.buffers(), *given)
        self.staying = {tensor.untyped_storage().data_ptr() for tensor in held}

    def pack(self, tensor):
        """Moves a saved tensor's storage, once for all that save it."""
        storage = tensor.untyped_storage()
        is_other = type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided
        if (
            is_other
            or tensor.device.type != self.carrier.device_type
            or storage.nbytes() < self.minimum_bytes
            or storage.data_ptr() in self.staying
        ):
            return tensor.detach()  # an output references its node, which would reference it
        key = storage.data_ptr(), tensor._version
        moved = self.moved.get(key)
        if moved is None or moved.original() is not storage:
            self.moved[key] = moved = _Moved(storage, self.carrier)
        return moved, tensor.dtype, tensor.device, tensor.storage_offset(), tensor.size(), tensor.stride()

    def unpack(self, packed):
        """Returns the tensor that autograd saved."""
        if isinstance(packed, torch.Tensor):
            return packed
        moved, dtype, device, *view = packed
        return torch.empty(0, dtype=dtype, device=device).set_(moved.restored(), *view)

    def around(self, forward):
        """Returns a forward whose saved tensors move; inside of other such hooks they are left to those."""

        @functools.wraps(forward)
        def run(*args, **kwargs):
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                return forward(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                return forward(*args, **kwargs)

        return run
'''

_NOTHING = '''
@functools.cache
def _nothing(dtype, device):
    """Returns the placeholder of a moved tensor: NaN, so that misuse shows."""
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
'''

_STATE = '''
class _StateElsewhere:
    """Moves an optimizer's state: it is in memory during step() and state_dict() alone, and reads as NaN elsewhere."""

    def __init__(self, optimizer, carrier, minimum_bytes, modules=None):
        self.optimizer, self.carrier, self.minimum_bytes = optimizer, carrier, max(minimum_bytes, 1)
        self.chosen = None if modules is None else {p for module in modules for p in module.parameters()}
        self.out = {}
        optimizer.register_step_pre_hook(self.before_step)
        self.hook = optimizer.register_step_post_hook(self.after_step)
        optimizer.register_state_dict_pre_hook(self.bring_all)
        optimizer.register_load_state_dict_pre_hook(self.bring_all)

    def before_step(self, optimizer, args, kwargs):
        self.bring_all()

    def after_step(self, *_):
        self.send(list(self.optimizer.state))

    def bring_all(self, *_):
        self.bring_back(list(self.out))

    def send(self, parameters):
        """Moves every state tensor of some parameters that is a storage of its own."""
        for parameter in parameters:
            if parameter in self.out or (self.chosen is not None and parameter not in self.chosen):
                continue
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.device.type != self.carrier.device_type:
                    continue
                if value.nbytes >= self.minimum_bytes and value.untyped_storage().nbytes() == value.nbytes:
                    place = self.carrier.send(value.untyped_storage())
                    out = (state, key, place, value.dtype, value.device, value.size(), value.stride())
                    self.out.setdefault(parameter, []).append(out)
                    state[key] = _nothing(value.dtype, value.device).expand(value.size())

    def bring_back(self, parameters):
        """Moves the state of some parameters back in."""
        for parameter in parameters:
            for state, key, place, dtype, device, size, stride in self.out.pop(parameter, ()):
                storage = self.carrier.fetch(place)
                state[key] = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, size, stride)
                self.carrier.forget(place)
'''

_ONE_BY_ONE = '''
class _StateOneByOne(_StateElsewhere):
    """Has the state of one parameter at a time in memory: step() updates one after another."""

    hidden, changes, is_updating = (), (), False

    def __init__(self, optimizer, *args, **kwargs):
        super().__init__(optimizer, *args, **kwargs)
        # The job's own hooks after steps find the gradients.
        optimizer._optimizer_step_post_hooks.move_to_end(self.hook.id, last=False)

    def before_step(self, optimizer, args, kwargs):
        """Updates every parameter that has a gradient; the optimizer's own step then finds no gradients."""
        if self.is_updating:
            raise RuntimeError(f"{type(optimizer).__name__} calls a step with hooks of its own: do without one_by_one.")
        self.show()
        closure, given = args[1] if len(args) > 1 else kwargs.get("closure"), None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            given = (optimizer, lambda: loss), {key: each for key, each in kwargs.items() if key != "closure"}
        step, self.hidden, self.changes = type(optimizer).step, [], []
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        groups = optimizer.param_groups
        for group in groups:
            places, changes = (group, vars(optimizer)), []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.bring_back([parameter])
                before = [dict(place) for place in places]
                group["params"], optimizer.param_groups, self.is_updating = [parameter], [group], True
                try:
                    step(optimizer)
                finally:
                    changes = [dict(place) for place in places]
                    for place, values in zip(places, before):
                        place.clear()
                        place.update(values)
                    self.is_updating = False
                    self.send([parameter])
                self.hidden.append((parameter, parameter.grad))
            for place, after in zip(places, changes):
                self.changes.append((place, {key: after[key] for key in after.keys() - {"params", "param_groups"}}))
        for parameter, _ in self.hidden:
            parameter.grad = None
        return given

    def after_step(self, *_):
        """Shows the gradients again; one step counts once in a group, and in an attribute."""
        for place, after in self.changes:
            place.update(after)
        self.show()

    def show(self):
        for parameter, gradient in self.hidden:
            parameter.grad = gradient
        self.hidden, self.changes = (), ()
'''

_WAITED = (
    "{described}: every copy is synchronous, instead of {ahead} ahead as in memprof: the peak is that of prefetch = "
    "0, and steps take longer than predicted."
)


def swap_code(policy: Swap, number: int) -> Code:
    """Returns the code of a swap of activations or of optimizer state.

    Args:
        policy: The policy.
        number: Index of the swap in the plan, from 0: each has its own file.
    """
    helpers = [_BYTES_OF, _DISK if policy.to == "disk" else _HOST]
    imports = ["import torch", "import functools", *(("import tempfile",) if policy.to == "disk" else ())]
    carrier = f"_Disk({text_of(policy.folder) if policy.folder else 'None'})" if policy.to == "disk" else "_Host()"
    if policy.what == "optimizer":
        chosen = ""
        if not policy.is_whole:
            imports += MODULES_IMPORTS
            helpers.append(MODULES)
            chosen = f", modules={call('_modules', 'model', list_of(expressions(policy.modules)))}.values()"
        kind, own = ("_StateOneByOne", (_STATE, _ONE_BY_ONE)) if policy.one_by_one else ("_StateElsewhere", (_STATE,))
        made = f"{kind}(optimizer, {carrier}, minimum_bytes={policy.minimum_bytes}{chosen})"
        return Code(tuple(imports), (*helpers, _NOTHING, *own), (made,), needs_optimizer=True)
    imports += [
        "import weakref",
        "from torch import nn",
        "from torch.utils._pytree import tree_leaves",
        *MODULES_IMPORTS,
    ]
    name = f"elsewhere_{number}" if number else "elsewhere"
    found = call("_modules", "model", list_of(expressions(policy.modules)))
    calls = (
        f"{name} = _SavedElsewhere(model, {carrier}, minimum_bytes={policy.minimum_bytes})",
        f"for module in {found}.values():\n    module.forward = {name}.around(module.forward)",
    )
    notes = (
        _WAITED.format(
            described=policy.describe(), ahead=f"{policy.prefetch} {'copy' if policy.prefetch == 1 else 'copies'}"
        ),
    )
    return Code(tuple(imports), (*helpers, MODULES, _SAVED), calls, notes=notes if policy.prefetch else ())
