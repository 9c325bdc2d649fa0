# SPDX-License-Identifier: Apache-2.0
"""R-81: recurrent states beside pages, by SGLang's storage."""

import functools

import pytest
import torch

from tests.clocks import AdvancingThreads
from tests.integration.sglang import fake, pools
from tests.integration.sglang.fake import hashes
from tests.integration.sglang.kit import Kit
from tests.integration.sglang.test_hicache import fill, slots
from tests.integration.sglang.test_tiers import Machines, fetched, pages_of
from ucm.errors import ConfigError
from ucm.integration.sglang import pages as pages_module
from ucm.integration.sglang.engine import host_rows, named, parts_of
from ucm.testing.slab_damage import Damage, damage, drop, stored


class States:
    """
    A storage with pages and states.

    Args:
        kit: Makes it.
        settings: More of ours.
    """

    def __init__(self, kit: Kit, dim: int = pools.DIM, **settings: object) -> None:
        self.storage = kit.storage("page_first_direct", **settings)
        self.pool = pools.MambaPoolHost(dim=dim)
        self.storage.register_mem_host_pool_v2(self.pool, fake.PoolName.MAMBA)

    def transfer(self, names: list[str], states: list[int] | None = None):
        """Return what SGLang asks about states."""
        where = None if states is None else torch.tensor(states)
        return fake.PoolTransfer(names, name=fake.PoolName.MAMBA, host_indices=where)

    def save(self, names: list[str], ends: list[str]) -> None:
        """Save pages, and a state behind some."""
        pages = list(range(len(names)))
        fill(self.storage, names, pages)
        assert all(self.storage.batch_set_v1(names, slots(pages)))
        for at, name in enumerate(ends):
            for part, content in zip(
                self.pool.state(at), state_of(name, self.pool), strict=True
            ):
                part.copy_(content)
        for at, name in enumerate(ends):
            saved = self.storage.batch_set_v2([self.transfer([name], [at])])
            assert {"mamba": [True]} == saved

    def found(self, names: list[str]):
        """Return what there is of a prefix that needs a state at its end."""
        return self.storage.batch_exists_v2(names, [self.transfer(["__placeholder__"])])

    def load(self, name: str, into: int) -> bool:
        """Load a state; return whether it is there."""
        (loaded,) = self.storage.batch_get_v2([self.transfer([name], [into])])["mamba"]
        return loaded


def state_of(name: str, pool: pools.MambaPoolHost) -> list[torch.Tensor]:
    """Return what the state behind a page of that hash is."""
    made = torch.Generator().manual_seed(int(name[:12], 16) + 1)
    return [
        torch.randint(1, 100, part.shape, generator=made).to(part.dtype)
        for part in pool.state(0)
    ]


def last_part(name: str) -> bytes:
    """Return how the key of a state's last block ends."""
    return bytes.fromhex(name) + (pools.LAYERS - 1).to_bytes(2, "big")


def is_state(world: States, at: int, name: str) -> bool:
    """Return whether all parts of a state are those of a hash."""
    pairs = zip(world.pool.state(at), state_of(name, world.pool), strict=True)
    return all(torch.equal(part, content) for part, content in pairs)


def test_states_are_restored_in_all_their_parts(kit: Kit) -> None:
    """R-81: in another process; of each dtype, and into another slot than they come from."""
    names = hashes(5)
    first = States(kit)
    first.save(names, [names[2], names[4]])
    first.storage.close()
    second = States(kit)
    found = second.found(names)
    assert (5, [3, 5]) == (found.kv_hit_pages, found.restorable_prefix_pages)
    assert {"kv": 5, "mamba": 5} == found.extra_pool_hit_pages
    assert second.load(names[4], 6)
    assert second.load(names[2], 3)
    assert is_state(second, 6, names[4])
    assert is_state(second, 3, names[2])
    assert not any(part.any() for part in second.pool.state(5))
    assert not second.load(names[3], 5)
    assert not any(part.any() for part in second.pool.state(5))


@pytest.mark.parametrize(
    ("ends", "restorable"), [([], []), ([0], [1]), ([1, 3], [2, 4]), ([4], [5])]
)
def test_prefix_ends_where_there_is_a_state(
    kit: Kit, ends: list[int], restorable: list[int]
) -> None:
    """R-81: pages behind it are of no use, and a state without its pages is none."""
    names = hashes(6)
    world = States(kit)
    world.save(names[:5], [*(names[at] for at in ends), names[5]])
    found = world.found(names)
    assert restorable == found.restorable_prefix_pages
    assert max(restorable, default=0) == found.kv_hit_pages


def test_state_that_is_damaged_is_not_there(kit: Kit) -> None:
    """R-81: it is held against its checksum; what SGLang has in its slot stays."""
    names = hashes(2)
    world = States(kit)
    world.save(names, names[1:])
    world.storage._kinds["mamba"].pages.staged.forget()
    damage(kit.slab, Damage.BITS, stored(kit.slab))
    assert not world.load(names[1], 4)
    assert not any(part.any() for part in world.pool.state(4))
    assert 0 == world.found(names).kv_hit_pages


def test_state_that_lacks_a_part_is_none(kit: Kit) -> None:
    """R-81: each layer of it is a block, and any of them may have made room."""
    names = hashes(2)
    world = States(kit)
    world.save(names, names)
    world.storage._kinds["mamba"].pages.staged.forget()
    (last,) = [each for each in stored(kit.slab) if each.endswith(last_part(names[1]))]
    assert 1 == drop(kit.slab, [last])
    assert [1] == world.found(names).restorable_prefix_pages
    assert not world.load(names[1], 4)
    assert not any(part.any() for part in world.pool.state(4))
    assert world.load(names[0], 5)
    assert is_state(world, 5, names[0])


def test_state_of_more_bytes_than_a_slab_takes_at_once_is_kept(kit: Kit) -> None:
    """R-81: a block has a sixteenth of a slab at most; a state of all layers may have more."""
    names, room = hashes(2), {"dim": 4096, "stage_bytes": "1MiB"}
    first = States(kit, **room)
    assert sum(part.nbytes for part in first.pool.state(0)) > 2**20 // 16
    first.save(names, names[1:])
    first.storage.close()
    second = States(kit, **room)
    assert [2] == second.found(names).restorable_prefix_pages
    assert second.load(names[1], 3)
    assert is_state(second, 3, names[1])


def test_model_that_has_convolutions_alone_has_no_other_states(kit: Kit) -> None:
    """R-81: SGLang has a buffer without elements for them."""
    pool = pools.MambaPoolHost()
    pool.temporal_buffer = torch.empty(8, pools.LAYERS, 1, 0)
    assert ["mamba.conv.0"] == list(host_rows(pool, "mamba."))


def test_states_that_are_not_layer_by_layer_are_refused_by_name(kit: Kit) -> None:
    """R-81: of another order, and with what belongs to no layer."""
    turned, more = pools.MambaPoolHost("page_first"), pools.MambaPoolHost()
    more.slot_state_buffers = [torch.zeros(8, 5)]
    for pool, why in ((turned, r"hicache_mem_layout.*page_first"), (more, "no layer")):
        storage = kit.storage("page_first_direct")
        with pytest.raises(ConfigError, match=why):
            storage.register_mem_host_pool_v2(pool, fake.PoolName.MAMBA)
        assert 0 == storage.batch_exists(hashes(1))


def test_shape_and_dtype_of_every_part_are_in_the_key(kit: Kit) -> None:
    """R-81: states of as many bytes that are others are not taken for each other."""

    def digest(pool: pools.MambaPoolHost) -> bytes:
        args, rows = fake.server_args(kit.model), host_rows(pool, "mamba.")
        return named(args, rows, "", 1, parts_of(pool))[1].digest

    kit.installed()
    turned, other = pools.MambaPoolHost(), pools.MambaPoolHost()
    turned.temporal_buffer = turned.temporal_buffer.transpose(3, 4).contiguous()
    other.conv_buffer = [each.view(torch.float16) for each in other.conv_buffer]
    deeper = pools.MambaPoolHost()
    deeper.num_mamba_layers = 2 * pools.LAYERS
    digests = [digest(pool) for pool in (pools.MambaPoolHost(), turned, other, deeper)]
    assert 4 == len(set(digests))
    assert digests[0] == digest(pools.MambaPoolHost())


@pytest.mark.parametrize(
    ("fetch", "first", "then"),
    [(60.0, [4.0], [4.0, 2.0, 2.0, 0.0]), (0.5, [0.5], [0.5, 0.5, 7.0, 0.0])],
)
def test_look_up_waits_for_no_more_than_sglang_gives_it(
    kit: Kit,
    monkeypatch: pytest.MonkeyPatch,
    fetch: float,
    first: list[float],
    then: list[float],
) -> None:
    """R-81: SGLang flushes while one goes on that nobody wants, and ends itself behind 10 s;
    whatever is asked of tiers leaves time for what follows."""
    names, clock = hashes(6), AdvancingThreads()
    clock.monotonic = lambda: clock._ahead  # it goes on when it is told to
    world = States(kit, timeout={"fetch": fetch})
    world.save(names, names[5:])
    monkeypatch.setattr(pages_module, "SYSTEM", clock)
    waits = []

    def ask(question, keys, *, timeout):
        waits.append(timeout)
        clock.advance(timeout)
        return question(keys, timeout=60.0)

    for kind in world.storage._kinds.values():
        pool = kind.pages._pool
        for name in ("prefetch", "contains"):
            monkeypatch.setattr(pool, name, functools.partial(ask, getattr(pool, name)))
    assert 5 == world.storage.batch_exists(names[:5])
    assert first == waits
    waits.clear()
    assert [6] == world.found(names).restorable_prefix_pages
    assert then == waits


@pytest.mark.slow
def test_states_are_what_a_tier_has(kit: Kit, machines: Machines) -> None:
    """R-81, R-53: the last one comes with the pages, from as far behind them as is looked."""
    names = hashes(6)
    first = machines.open(functools.partial(States, kit))
    first.save(names, [names[0], names[5]])
    first.storage.close()
    machines.move()
    second = machines.open(functools.partial(States, kit))
    assert 0 == second.found(names[:5]).kv_hit_pages
    assert [5, 0] == [fetched(pages) for pages in pages_of(second)]
    assert 1 == second.found(names[:4]).kv_hit_pages
    assert [1, 6] == second.found(names).restorable_prefix_pages
    for at in (0, 5):
        assert second.load(names[at], at)
        assert is_state(second, at, names[at])
    assert [6, 2 * pools.LAYERS] == [fetched(pages) for pages in pages_of(second)]
    second.storage.close()


@pytest.mark.slow
def test_tier_that_does_not_answer_is_asked_for_one_state(
    kit: Kit, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-81, R-53: a look-up waits for it once, and not for each page."""
    names = hashes(4)
    world = machines.open(functools.partial(States, kit))
    world.save(names, [])
    pool, asked = world.storage._kinds["mamba"].pages._pool, []
    prefetch = pool.prefetch

    def prefetch_late(keys: list[bytes], timeout: float) -> object:
        asked.append(keys)
        return prefetch(keys, timeout=0)

    monkeypatch.setattr(pool, "prefetch", prefetch_late)
    assert [] == world.found(names).restorable_prefix_pages
    assert 1 == len(asked)
    world.storage.close()
