# SPDX-License-Identifier: Apache-2.0
"""
Holds a release of vLLM that was never tried against what this door needs of one.

``needs.json`` says it, made from the newest release that was tried by
``python -m tests.golden.make_engine_needs``. What an engine offers comes from
``sources``; ``differences`` is pure and imports no engine.

What differs is refused where blocks could go wrong or a step could break, and named
only where it cannot: a setting that is declared otherwise is still one that goes into
the keys as it is, and a hook that the door does not know is left to the base class.
"""

import ast
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import attrs

from ucm.integration.vllm.sources import CALL, HOOK_OWNERS

__all__ = ["Differences", "Needs", "Offer", "differences", "load_needs"]

_Texts = Mapping[str, Collection[str]]
_Keeps = Callable[[Collection[str], Collection[str]], bool]


@attrs.frozen(kw_only=True)
class Needs:
    """
    What the door needs of an engine; names and texts as ``sources`` writes them.

    Args:
        release: From which this was made.
        hooks: What the door overrides.
        members: Fields and methods that it uses.
        settings: Fields of the engine's configuration that it reads.
        known: Hooks that the door overrides or leaves to the base on purpose.
    """

    release: str
    hooks: Mapping[str, Sequence[str]]
    members: Mapping[str, Sequence[str]]
    settings: Mapping[str, Sequence[str]]
    known: Sequence[str]


def load_needs() -> Needs:
    """Return what this door needs."""
    path = Path(__file__).with_name("needs.json")
    return Needs(**json.loads(path.read_text(encoding="utf-8")))


@attrs.frozen
class Offer:
    """
    What an engine has.

    Args:
        names: What it offers and calls, by name, as ``sources`` writes it.
        abstract: Hooks that it wants every connector to write.
    """

    names: _Texts
    abstract: Collection[str]


@attrs.frozen
class Differences:
    """
    What an engine has otherwise.

    Args:
        refused: What the door cannot work with, each a sentence.
        noted: What it can.
    """

    refused: Sequence[str]
    noted: Sequence[str]


def differences(needs: Needs, offer: Offer) -> Differences:
    """Return what an engine has otherwise than the door needs it."""
    offered, abstract = offer.names, offer.abstract
    own = {name.partition(".")[2] for name in needs.hooks}
    refused = [
        *_changed(needs, needs.hooks, offered, keeps=_is_same),
        *_changed(needs, needs.members, offered, keeps=_is_as_good),
        *(f"{name} is gone" for name in needs.settings if not _find(name, offered)),
        *_unbound(needs, offered),
        *(f"{name} is abstract" for name in sorted(abstract) if name not in own),
    ]
    noted = [
        *_changed(needs, needs.settings, offered, keeps=_is_same, tells_gone=False),
        *(f"{name} is new" for name in _new_hooks(needs, offered)),
    ]
    return Differences(refused, noted)


def _changed(
    needs: Needs,
    names: Mapping[str, Sequence[str]],
    offered: _Texts,
    *,
    keeps: _Keeps,
    tells_gone: bool = True,
) -> Iterator[str]:
    for name, texts in names.items():
        found = _find(name, offered)
        if not found and tells_gone:
            yield f"{name} is gone"
        elif found and not keeps(texts, found):
            was, now = " or ".join(sorted(texts)), " or ".join(sorted(found))
            yield f"{name} is {now}, in {needs.release} {was}"


def _find(name: str, offered: _Texts) -> Collection[str]:
    """Return what is said of a member, by its class or by what that derives from."""
    owner, _, member = name.partition(".")
    if name in offered or not member:
        return offered.get(name, ())
    for text in offered.get(owner, ()):
        for base in text.split(", "):
            if base != owner and (found := _find(f"{base}.{member}", offered)):
                return found
    return ()


def _is_same(known: Collection[str], found: Collection[str]) -> bool:
    return set(known) == set(found)


def _is_as_good(known: Collection[str], found: Collection[str]) -> bool:
    """Return whether what can be read or called as before still can be."""
    if _is_same(known, found):
        return True
    before = [one for text in known if (one := _signature(text)) is not None]
    after = [one for text in found if (one := _signature(text)) is not None]
    return bool(before and after) and all(
        _takes_as_much(new, old) for new in after for old in before
    )


def _takes_as_much(new: Signature, old: Signature) -> bool:
    kinds = {name: each.kind for name, each in old.parameters.items()}
    more = [each for each in new.parameters.values() if each.name not in kinds]
    same = {name: each.kind for name, each in new.parameters.items() if name in kinds}
    return list(same.items()) == list(kinds.items()) and all(
        each.default is not Parameter.empty
        or each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        for each in more
    )


def _unbound(needs: Needs, offered: _Texts) -> Iterator[str]:
    """Yield calls of the engine that a hook of ours does not take."""
    for name, texts in needs.hooks.items():
        owner, _, hook = name.partition(".")
        takes = [one for text in texts if (one := _signature(text)) is not None]
        if owner not in HOOK_OWNERS or not takes:
            continue
        for call in sorted(offered.get(CALL + hook, ())):
            if not any(_binds(one, call) for one in takes):
                yield f"{hook} is called with {call}, in {needs.release} {texts[0]}"


def _binds(signature: Signature, call: str) -> bool:
    node = ast.parse(f"_{call}", mode="eval").body
    if not isinstance(node, ast.Call):
        return False
    words = {word.arg: word for word in node.keywords if word.arg is not None}
    args = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
    is_whole = [len(args), len(words)] == [len(node.args), len(node.keywords)]
    try:
        (signature.bind if is_whole else signature.bind_partial)(*args, **words)
    except TypeError:
        return False
    return True


def _signature(text: str) -> Signature | None:
    """Return parameters that are written as text; None for what is no function."""
    if not text.startswith("("):
        return None
    function = ast.parse(f"def _{text}: ...").body[0]
    if not isinstance(function, ast.FunctionDef):
        return None
    args = function.args
    defaults = [None] * (len(args.posonlyargs) + len(args.args) - len(args.defaults))
    placed = zip(
        [
            *((arg, Parameter.POSITIONAL_ONLY) for arg in args.posonlyargs),
            *((arg, Parameter.POSITIONAL_OR_KEYWORD) for arg in args.args),
        ],
        [*defaults, *args.defaults],
        strict=True,
    )
    words = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    found = [_parameter(arg, kind, default) for (arg, kind), default in placed]
    if args.vararg is not None:
        found.append(_parameter(args.vararg, Parameter.VAR_POSITIONAL))
    found += [
        _parameter(arg, Parameter.KEYWORD_ONLY, default) for arg, default in words
    ]
    if args.kwarg is not None:
        found.append(_parameter(args.kwarg, Parameter.VAR_KEYWORD))
    return Signature(found)


def _parameter(arg: ast.arg, kind: Any, default: ast.expr | None = None) -> Parameter:  # noqa: ANN401 - its type is private
    """Return a parameter; of its default only that there is one."""
    return Parameter(
        arg.arg, kind, default=Parameter.empty if default is None else None
    )


def _new_hooks(needs: Needs, offered: _Texts) -> Iterator[str]:
    for name in sorted(offered):
        owner, _, hook = name.partition(".")
        is_hook = owner in HOOK_OWNERS and hook and not hook.startswith("_")
        if is_hook and name not in needs.known:
            yield name
