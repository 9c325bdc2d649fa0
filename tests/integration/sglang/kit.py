# SPDX-License-Identifier: Apache-2.0
"""Doors to a SGLang that is not there, and a slab below them."""

import types
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from tests.integration.sglang import fake, pools

__all__ = ["Kit"]


class Kit:
    """
    Makes doors over one slab.

    Args:
        root: Directory of the test's own.
        opened: Closes them.
    """

    def __init__(self, root: Path, opened: ExitStack) -> None:
        self.model = root / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.slab = root / "slab"
        self.longest: float | None = None
        """Seconds of a call of a storage, if not as many as it has."""
        self._root = root
        self._opened = opened
        self._count = 0

    def installed(self, release: str = "0.5.23", **changed: Any) -> Any:
        """Let SGLang be there, with settings; return the doors' modules."""
        self._count += 1
        self.args = fake.server_args(self.model, **changed)
        site = self._root / f"site-{self._count}"
        return self._opened.enter_context(fake.installed(self.args, site, release))

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return those of ours."""
        store = {"path": str(self.slab), "capacity": "1MiB"}
        stage = 8 * pools.PAGE_BYTES
        return {"store": store, "log": {"level": "off"}, "stage_bytes": stage, **more}

    def engine(self, pool: Any = None, **more: Any) -> fake.Engine:
        """Return an engine with a linker, as SGLang makes it."""
        modules = self.installed(**more.pop("args", {}))
        pool = pool or pools.MHATokenToKVPool()
        params = types.SimpleNamespace(
            page_size=pools.TOKENS,
            token_to_kv_pool_allocator=types.SimpleNamespace(get_kvcache=lambda: pool),
            tp_cache_group=ProcessGroup(more.pop("rank", 0), self.args.tp_size),
        )
        names = more.pop("components", ["FULL"])
        linker = modules.linker.Linker(
            self.args,
            params,
            components=[types.SimpleNamespace(name=name) for name in names],
            extra_config=self.settings(**{"patience": 60, **more}),
        )
        self._opened.callback(linker.close)
        return fake.Engine(linker, pool)

    def storage(
        self, layout: str = "layer_first", make: Any = None, **more: Any
    ) -> Any:
        """Return a storage with a host pool, as SGLang makes it."""
        modules = self.installed(**more.pop("args", {}))
        longest = more.pop("longest", self.longest)
        if longest is not None:
            modules.hicache._LONGEST_S = longest
        extra = {"backend_name": "x", "interface_v1": 1, **self.settings(**more)}
        config = types.SimpleNamespace(tp_rank=0, tp_size=1, extra_config=extra)
        storage = modules.hicache.Storage(config, {})
        self._opened.callback(storage.close)
        make = make or pools.MHATokenToKVPoolHost
        storage.register_mem_pool_host(make(layout))
        storage.register_mem_host_pool_v2(storage.mem_pool_host, fake.PoolName.KV)
        return storage
