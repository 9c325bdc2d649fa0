# SPDX-License-Identifier: Apache-2.0
"""
What has a model of torch compute otherwise than its code and its weights say.

``torch.autocast``, which is a thread's own; hooks, on a module, on all of them, or of
accelerate; and what takes the place of a ``forward``.

Threading: any thread.
"""

import contextlib
import functools
import hashlib
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn.modules import module as everywhere

__all__ = [
    "autocast_of",
    "casting",
    "casts_here",
    "changes_of",
    "code_of",
    "hooks_of",
    "types_of",
]


def autocast_of(kind: str) -> torch.dtype | None:
    """Return in which type ``torch.autocast`` has this thread compute on a kind of device, if in any."""
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def casts_here() -> dict[str, torch.dtype | None]:
    """Return ``autocast_of`` each kind of device on which parts of a model may be."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu"} | ({accelerator.type} if accelerator else set())
    return {
        kind: autocast_of(kind)
        for kind in sorted(kinds)
        if torch.amp.is_autocast_available(kind)
    }


@contextlib.contextmanager
def casting(casts: Mapping[str, torch.dtype | None]) -> Iterator[None]:
    """Have ``torch.autocast`` be so on this thread meanwhile."""
    with contextlib.ExitStack() as kept:
        for kind, cast in casts.items():
            kept.enter_context(torch.autocast(kind, cast, enabled=cast is not None))
        yield


def hooks_of(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield of all that is called around a ``forward`` whose it is, and where it was made."""
    found: list[tuple[str, object]] = [
        ("all modules", each)
        for each in (
            *everywhere._global_forward_hooks.values(),  # noqa: SLF001 - no other name
            *everywhere._global_forward_pre_hooks.values(),  # noqa: SLF001 - no other name
        )
    ]
    for module in model.modules():
        own = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())  # noqa: SLF001 - no other name
        theirs = (module._hf_hook,) if hasattr(module, "_hf_hook") else ()  # noqa: SLF001 - accelerate's
        found += [(type(module).__name__, each) for each in (*own, *theirs)]
    for where, hook in found:
        yield where, _made_in(hook)
        several = getattr(hook, "hooks", ())  # of accelerate, in one
        found += [(where, each) for each in several]


def changes_of(module: torch.nn.Module) -> Iterator[str]:
    """Yield what one module computes with in place of its class's ``forward``."""
    if (own := _replaced(module)) is not None:
        who = [getattr(own, at, "") for at in ("__module__", "__qualname__")]
        yield f"forward {who}"
    if module._compiled_call_impl is not None:  # noqa: SLF001 - no other name
        yield "compiled"


def types_of(model: torch.nn.Module) -> tuple[str, torch.nn.Module]:
    """
    Return what no file of weights holds.

    That is a digest of the types that the model is of, and of what takes the place of a
    ``forward``, and a module of the tensors that are in no checkpoint.
    """
    made, stored = torch.nn.Module(), model.state_dict().keys()
    types = hashlib.sha256()
    for name, module in model.named_modules():
        types.update(f"{name} {type(module).__qualname__}\n".encode())
        for each in changes_of(module):
            types.update(f"{name} {each}\n".encode())
        tensors = {**dict(module.named_parameters(recurse=False)), **module._buffers}  # noqa: SLF001 - those that share memory too
        for key, each in sorted(tensors.items()):
            if each is None:
                continue
            told = f"{key} {type(each).__qualname__} {each.dtype} {[*each.shape]}\n"
            types.update(told.encode())
            if f"{name}.{key}".lstrip(".") not in stored:
                made.register_buffer(f"{name}.{key}".replace(".", "/"), each)
    return types.hexdigest(), made


def code_of(model: torch.nn.Module, *called: object) -> tuple[str, list[str]]:
    """
    Return digests of the code of a model's class, and of others': some have the same name.

    Others are those of its parts, what all these are made of, and what else it calls, also
    by way of what wraps it, but not of Python, torch and transformers, whose release says
    what they are.

    Raises:
        OSError: Some of it is in no file; says whose.
    """
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise OSError("what torch.jit has compiled is in no file")
    whole = _file_of(type(model))
    made_of: set[object] = {
        each for part in model.modules() for each in type(part).__mro__
    }
    for each in itertools.chain(*map(_wrapped, called)):
        made_of.add(each if inspect.isroutine(each) else type(each))
    known = {*sys.stdlib_module_names, "torch", "transformers"}
    others = {each for each in made_of if _home(each).partition(".")[0] not in known}
    files = [whole, *({*map(_file_of, others)} - {whole})]
    code, *rest = (hashlib.sha256(each.read_bytes()).hexdigest() for each in files)
    return code, sorted(rest)


def _file_of(kind: Any) -> Path:  # noqa: ANN401 - a class, or a function
    is_of_python = isinstance(kind, type | FunctionType | MethodType)
    try:  # of a native function it is its module that has one
        file = inspect.getfile(kind if is_of_python else sys.modules[_home(kind)])
        return Path(file).resolve(strict=True)
    except (OSError, TypeError, KeyError):
        told = getattr(kind, "__qualname__", kind)
        raise OSError(f"the code of {told}, of {_home(kind)}, is in no file") from None


def _home(kind: object) -> str:
    """Return the module of a class or function; what wraps another bears that one's name."""
    names = getattr(kind, "__globals__", {})
    return str(names.get("__name__") or _made_in(kind))


def _replaced(module: torch.nn.Module) -> object | None:
    """Return a function that is not that of the class, or is not of the class's own code."""
    owner = next(each for each in type(module).__mro__ if "forward" in vars(each))
    plain: object = type(module).forward
    own: object = vars(module).get("forward")
    if _made_in(own).startswith("accelerate."):  # it has kept what it calls
        own = vars(module).get("_old_forward")
    if own is not None and getattr(own, "__func__", None) is not plain:
        return own
    is_its = getattr(plain, "__module__", "") == owner.__module__
    return None if is_its else plain


def _made_in(called: object) -> str:
    """Return the module of what is called in the end."""
    return str(getattr(_unwrapped(called), "__module__", ""))


def _wrapped(called: object) -> list[object]:
    """Return what is called in the end, and what that says that it wraps."""
    found: list[object] = []
    called = _unwrapped(called)
    while called is not None and not any(called is each for each in found):
        found.append(called)
        called = _unwrapped(getattr(called, "__wrapped__", None))
    return found


def _unwrapped(called: object) -> object:
    while isinstance(called, functools.partial):
        called = called.func
    return called
