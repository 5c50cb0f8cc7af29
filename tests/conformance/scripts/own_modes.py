from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training import make, step


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


model, optimizer = make()
for number in range(5):
    seen = []
    with Operators():
        step(model, optimizer)
    print(number, seen)
    seen = []
    with Functions():
        step(model, optimizer)
    print(number, seen)
with Operators():  # across the edges of the window
    for number in range(5):
        seen = []
        step(model, optimizer)
        print(number, len(seen))
