import sys

module = sys.modules.get("sitecustomize")
print(module and (module.__name__, module.__file__, module.__spec__.origin, module.started))
print(sys.path)
