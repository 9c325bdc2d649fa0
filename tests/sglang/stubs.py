# SPDX-License-Identifier: Apache-2.0
"""
Stand-ins for packages that SGLang imports, and does not need to serve on a CPU.

``triton`` and ``sgl_kernel`` are builds for CUDA, ``torchvision`` comes as one;
``IPython`` and ``gguf`` are for other uses. Names are there, so that modules which mention
them can be imported. Decorators return what they decorate; a kernel that is called all the
same fails, for a plain function has no launch grid.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch

NAMES = frozenset({"triton", "sgl_kernel", "torchvision", "IPython", "gguf"})
OPERATORS = ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu")
"""Of ``sgl_kernel``, asked for where the module is imported that knows of recurrent layers."""


class Anything:
    """Whatever is asked of a stand-in in lower case."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "backend":  # of triton's driver, by which torch's module is found
            return "cpu"
        return Anything(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        """Return what is decorated, or is constant; or what decorates."""
        if len(args) == 1 and not kwargs and not isinstance(args[0], dict):
            return args[0]
        return Anything(f"{self.__name__}()")

    def __mro_entries__(self, bases):
        return (object,)

    def __or__(self, other):
        return self

    __ror__ = __or__


class _Class(type):
    """Of classes whose every attribute is there."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{cls.__name__}.{name}")


class _Module(types.ModuleType):
    __version__ = "3.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return _Class(name, (), {"__init__": lambda self, *args, **kwargs: None})
        return Anything(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def install() -> None:
    """Let the names be found where nothing else is."""
    sys.meta_path.append(_Finder())
    for name in OPERATORS:
        setattr(torch.ops.sgl_kernel, name, Anything(name))
