# SPDX-License-Identifier: Apache-2.0
"""
Write what of ucm is public, name by name with its signature, to docs/api-surface.txt.

Read from the source: nothing is imported, so that it is the same on every machine. A
change of it is a change for users, made on purpose: docs/compatibility.md says which may
be made when.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import griffe

__all__ = ["PAGE", "PUBLIC", "ROOT", "render"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api-surface.txt"
PUBLIC: dict[str, tuple[str, ...]] = {
    "ucm": (),
    "ucm.blocking": (),
    "ucm.cache.aio": ("Cache", "Moment", "Save"),
    "ucm.cache.sync": ("Answer", "Cache", "Load", "Save"),
    "ucm.cache.staged": (),
    "ucm.cache.fetches": ("Fetched",),
    "ucm.cache.forgetting": ("Forgotten",),
    "ucm.cache.transfers": ("Result", "Statistics"),
    "ucm.pipeline.outcomes": ("OutcomeKind",),
    "ucm.reasons": ("Reason",),
    "ucm.errors": (),
    "ucm.blocks": ("BlockId", "GroupId", "KeySpace", "PackedKey", "RowId"),
    "ucm.prefixes": (),
    "ucm.layout": (),
    "ucm.config": ("StoreConfig", "UCMConfig"),
    "ucm.settings": ("field", "read_section", "read_size"),
    "ucm.exporter": (),
    "ucm.pipeline.stage": ("Chain",),
    "ucm.pipeline.save": ("OwnStage", "OwnStages", "Sealed", "sealed_blocks"),
    "ucm.stores.abc": (),
    "ucm.stores.leases": (),
    "ucm.stores.wrap": (),
    "ucm.stores.memory": (),
    "ucm.plan": ("HostSlots",),
    "ucm.uses": ("Uses",),
    "ucm.fates": ("Fate", "Told"),
    "ucm.backends.abc": (),
    "ucm.seals": (),
    "ucm.backends.envelope": (),
    "ucm.backends.wrap": (),
    "ucm.backends.opening": (),
    "ucm.devices.abc": (),
    "ucm.devices.cpu": ("CPUDevice",),
    "ucm.registry": (),
    "ucm.integration.transformers.awaiting": (),
    "ucm.integration.transformers.continuous": (),
    "ucm.integration.transformers.dynamic": (),
    "ucm.testing.store_contract": (),
    "ucm.testing.lease_contract": (),
    "ucm.testing.room_contract": (),
    "ucm.testing.store_blocks": (),
    "ucm.testing.backend_contract": (),
    "ucm.testing.loan_contract": (),
    "ucm.testing.backend_faults": (),
    "ucm.testing.device_contract": (),
    "ucm.testing.fence_contract": (),
    "ucm.testing.device_memory": (),
    "ucm.testing.door": (),
    "ucm.testing.door_contract": (),
    "ucm.testing.slab_damage": (),
    "ucm.testing.faults": (),
    "ucm.testing.host": (),
}
"""Public modules; of some of them only these names, of the others what ``__all__`` has."""


_NOT_OURS_TO_SAY = ("ucm.cache.aio.Cache.cancel", "ucm.cache.aio.Cache.wait_save")
"""What the library's own classes call of each other, across the modules' borders."""
_SET = ("class-attribute", "module-attribute")
_TOLD = ("abstractmethod", "async", "classmethod", "property", "staticmethod")


@functools.cache
def render() -> str:
    """Return the surface, a line for each name."""
    package = griffe.load("ucm", search_paths=[ROOT], resolve_aliases=True)
    lines = []
    for path, chosen in PUBLIC.items():
        module = package
        for name in path.split(".")[1:]:
            module = module[name]
        lines += ["", f"# {path}"]
        for name in chosen or sorted(map(str, module.exports or _defined_in(module))):
            lines += _lines(module[name], name)
    return "\n".join(lines[1:]) + "\n"


def _defined_in(module: griffe.Object | griffe.Alias) -> Iterator[str]:
    """Yield the public classes and functions of a module without ``__all__``."""
    for name, member in module.members.items():
        is_told = not member.is_alias and (member.is_class or member.is_function)
        if is_told and not name.startswith("_"):
            yield name


def _lines(member: griffe.Object | griffe.Alias, name: str) -> Iterator[str]:
    """Yield a name, and those that belong to it."""
    if member.is_alias:
        yield f"{name} = {member.target_path}"
        return
    labels = " ".join(sorted(member.labels.intersection(_TOLD)))
    before = f"{labels} " if labels else ""
    if member.is_function:
        yield before + str(member.signature(name=name))
    elif member.is_class:
        bases = ", ".join(str(base) for base in member.bases)
        yield f"class {name}({bases})" if bases else f"class {name}"
        for inner, each in sorted(member.members.items()):
            if _is_told(each, inner):
                yield from (f"    {line}" for line in _lines(each, inner))
    elif member.is_attribute:
        told = f": {member.annotation}" if member.annotation else ""
        is_set = not member.labels.isdisjoint(_SET) and member.value is not None
        value = f" = {member.value}" if is_set and len(str(member.value)) < 60 else ""
        yield f"{before}{name}{told}{value}"
    else:
        yield name  # a module


def _is_told(member: griffe.Object | griffe.Alias, name: str) -> bool:
    if name == "__init__":  # of a cache's: ``ucm.open`` alone makes them
        return not member.path.startswith("ucm.cache.")
    return not name.startswith("_") and member.path not in _NOT_OURS_TO_SAY


def main() -> None:
    """Write it again."""
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
