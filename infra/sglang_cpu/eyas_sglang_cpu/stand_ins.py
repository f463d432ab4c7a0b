"""Stand-ins for `sgl_kernel` and `torchvision`: importable, and loud when something of them is really used.

The `sgl_kernel` wheel links libcuda, so importing it without a driver ends the server at start-up; `torchvision` serves
image inputs only. A text model on a CPU uses neither, apart from the few `*_cpu` operations in `ops`.
"""

import importlib.machinery
import sys
import types

_VERSIONS = {"sgl_kernel": "0.4.10", "torchvision": "0.0.0"}  # sgl_kernel: the oldest version SGLang 0.5.23 accepts


class _Absent:
    """Anything asked of a stand-in: can be named, passed on and looked into, but not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} does not exist on this machine: eyas-sglang-cpu only stands in for it")

    def __getattr__(self, name: str) -> "_Absent":
        if name.startswith("__"):  # protocols (copy, pickle, numpy) must see that there is nothing
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __repr__(self) -> str:
        return f"<stand-in for {self._name}>"


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        value = None
        if self.__name__ == "sgl_kernel":
            from eyas_sglang_cpu import ops

            value = getattr(ops, name, None) if name.endswith("_cpu") else None
        if value is None:
            value = _Absent(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder:
    """Import hook for the stand-ins and every module below them."""

    def find_spec(self, fullname: str, path=None, target=None):
        if fullname.partition(".")[0] in _VERSIONS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        module.__version__ = _VERSIONS.get(spec.name, "0.0.0")
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Make the stand-ins importable. Idempotent; a package that is really installed always wins."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
