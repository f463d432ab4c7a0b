"""An import-only stand-in for triton: kernels can be defined, never launched.

SGLang decorates hundreds of functions with `triton.jit` at import time. The real package is 1 GB and cannot run
without a GPU; this one makes the imports succeed and says which kernel it was if one is launched after all.
"""

import importlib
import importlib.machinery
import sys
import types

__version__ = "3.0.0"


class _Harmless:
    """Any value of triton that is only named, passed on, subscripted or or-ed while modules are imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType):
            return _Kernel(args[0])
        return self

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Harmless(f"{self._name}.{name}")

    def __getitem__(self, item):
        return self

    def __or__(self, other):
        return self

    __ror__ = __or__


class _Kernel:
    """A decorated function: keeps its name, refuses to run."""

    def __init__(self, function) -> None:
        self.fn = function
        self.__name__, self.__doc__, self.__module__ = function.__name__, function.__doc__, function.__module__

    def __getitem__(self, grid):
        raise NotImplementedError(f"the triton kernel {self.__name__} was launched, but triton is only a stand-in here")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"the triton kernel {self.__name__} was called, but triton is only a stand-in here")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Harmless(name)


class _Decorator(_Harmless):
    """`jit`, `autotune` and `heuristics`, with and without arguments, and stacked."""

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, _Kernel)):
            return _kernel(args[0])
        return _kernel


def _kernel(function) -> _Kernel:
    return function if isinstance(function, _Kernel) else _Kernel(function)


class _NoDriver:
    """`triton.runtime.driver`. torch asks it for a GPU and expects exactly this RuntimeError when there is none."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError("0 active drivers ([]). There should only be one.")


def _attribute_of(module_name: str):
    def __getattr__(name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{module_name}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        if full == "triton.runtime.driver":
            value = _NoDriver()
        elif name in ("jit", "autotune", "heuristics"):
            value = _Decorator(full)
        elif name[:1].isupper():  # classes: used as bases, in annotations and isinstance
            value = type(name, (), {"__init__": lambda self, *args, **kwargs: None, "__module__": module_name})
        else:
            value = _Harmless(full)
        setattr(sys.modules[module_name], name, value)
        return value

    return __getattr__


class _Finder:
    """Every `triton.something` can be imported."""

    def find_spec(self, fullname: str, path=None, target=None):
        if fullname.startswith("triton."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = _attribute_of(module.__name__)
        if module.__name__ == "triton.language":  # constants of kernels are wrapped at import time and read back
            module.constexpr = type(
                "constexpr", (), {"__init__": lambda self, value=None: setattr(self, "value", value)}
            )


sys.meta_path.insert(0, _Finder())
__getattr__ = _attribute_of(__name__)


def cdiv(a: int, b: int) -> int:
    """Ceiling division, used by host code as well."""
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n, used by host code as well."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


for _part in ("language", "runtime"):  # SGLang says triton.language without importing it
    importlib.import_module(f"triton.{_part}")
