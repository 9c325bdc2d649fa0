# SPDX-License-Identifier: Apache-2.0
"""``ucm.open`` and ``ucm.blocking.open`` as a host calls them, and what they refuse."""

import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import ucm
from tests.cache.kit import (
    HASHER,
    KEYSPACE,
    LAYERS,
    LAYOUT,
    PAGE_SHAPE,
    both_loops,
    keys_of,
    our_threads,
)
from ucm.cache import opening
from ucm.cache.opening import ENGINES_ONLY
from ucm.config import UCMConfig
from ucm.configuration.sources import flat
from ucm.devices.cpu import CPUDevice
from ucm.errors import ConfigError, LayoutError, PipelineError, StoreUnavailableError
from ucm.pipeline.save import OwnStage, Sealed
from ucm.pipeline.stage import Chain
from ucm.status import read_statuses
from ucm.stores.memory import MemoryStore
from ucm.tracing import SETTING_IGNORED

pytestmark = pytest.mark.anyio


def pool_of(num_blocks: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the memory of a host."""
    rng = np.random.default_rng(seed)
    shape = (num_blocks, *PAGE_SHAPE)
    return {name: rng.integers(0, 256, shape, np.uint8) for name in LAYERS}


def settings(path: Path) -> dict[str, object]:
    """Return settings of a small slab."""
    return {"store": {"path": str(path), "capacity": "1MiB"}, "log": {"level": "off"}}


@both_loops
async def test_blocks_outlive_the_process_that_stored_them(tmp_path: Path) -> None:
    """A second cache over the same slab finds what the first one saved."""
    pool, keys = pool_of(), keys_of(4)
    config = settings(tmp_path / "slab")
    async with ucm.open(config, layout=LAYOUT, device=pool, keyspace=KEYSPACE) as cache:
        await cache.save(keys, range(4)).committed
    async with ucm.open(
        UCMConfig.from_mapping(config),
        layout=LAYOUT,
        device=pool,
        keyspace=KEYSPACE,
    ) as cache:
        assert 4 == await cache.match(keys)
        assert (await cache.load(keys, range(8, 12))).is_whole
    assert all((each[:4] == each[8:12]).all() for each in pool.values())
    assert set() == our_threads()


@both_loops
async def test_a_cache_is_opened_once_at_a_time(tmp_path: Path) -> None:
    """R-42: entered twice it would leave its first threads and store to nobody."""
    keys = keys_of(1)
    opening = ucm.open(
        settings(tmp_path / "slab"),
        layout=LAYOUT,
        device=pool_of(),
        keyspace=KEYSPACE,
    )
    async with opening as cache:
        with pytest.raises(PipelineError, match="open already"):
            await opening.__aenter__()
        assert (await cache.save(keys, [0]).committed).is_whole
    async with opening as cache:
        assert 1 == await cache.match(keys)
    assert set() == our_threads()


def test_a_cache_tells_how_it_is_to_who_looks(tmp_path: Path) -> None:
    """A host of its own is seen by ``ucm top`` as long as its cache is open."""
    keys, slab = keys_of(2), tmp_path / "slab"
    with ucm.blocking.open(
        settings(slab), layout=LAYOUT, device=pool_of(), keyspace=KEYSPACE
    ) as cache:
        cache.save(keys, [0, 1]).wait_committed()
        (told,) = read_statuses(slab).answers
    assert ("cache-0", 2) == (
        told.role,
        told.counters["ucm_settled_parts_total|save|committed|"],
    )
    assert not (slab / "status").exists()
    assert set() == our_threads()


def test_tensors_and_registered_devices_are_taken_too(tmp_path: Path) -> None:
    """The memory of one host is found by another, whatever it is made of."""
    torch = pytest.importorskip("torch")
    arrays, keys = pool_of(), keys_of(2)
    tensors = {name: torch.from_numpy(each.copy()) for name, each in arrays.items()}
    registered = CPUDevice()
    registered.register(LAYOUT, arrays)
    config = settings(tmp_path / "slab")
    for device, blocks in ((tensors, [0, 1]), (registered, [4, 5])):
        with ucm.blocking.open(
            config, layout=LAYOUT, device=device, keyspace=KEYSPACE
        ) as cache:
            cache.save(keys, [0, 1]).wait_committed()
            assert cache.load(keys, blocks).is_whole
    assert all((each[[0, 1]] == each[[4, 5]]).all() for each in arrays.values())


def test_memory_without_dimensions_is_given_some(tmp_path: Path) -> None:
    """Mapped memory is bytes: as it is it has no blocks, and what docs/embedding.md says of
    it has them."""
    nbytes, keys = LAYOUT.max_block_bytes // len(LAYERS), keys_of(2)
    flat = {name: mmap.mmap(-1, 4 * nbytes) for name in LAYERS}
    shaped = {
        name: memoryview(each).cast("B", [4, nbytes]) for name, each in flat.items()
    }
    given = {"layout": LAYOUT, "keyspace": KEYSPACE}
    config = settings(tmp_path / "slab")
    with pytest.raises(LayoutError, match="in one piece"):
        ucm.blocking.open(config, device=flat, **given)
    for each in flat.values():
        each[:nbytes] = bytes([7]) * nbytes
    with ucm.blocking.open(config, device=shaped, **given) as cache:
        assert cache.save(keys, [0, 1]).wait_committed().is_whole
        assert 2 == cache.load(keys, [3, 2]).leading
    assert {bytes([7]) * nbytes} == {each[3 * nbytes :] for each in flat.values()}


class TestRefusals:
    def test_two_openers_with_different_layouts_do_not_mix(
        self, tmp_path: Path
    ) -> None:
        """Whoever has blocks of another shape has keys of his own, or an error."""
        other = ucm.paged_layout(dict.fromkeys(LAYERS, 64), block_tokens=16)
        pool = {name: np.zeros((4, 64), np.uint8) for name in LAYERS}
        config = settings(tmp_path / "slab")
        with ucm.blocking.open(
            config, layout=LAYOUT, device=pool_of(), keyspace=KEYSPACE
        ) as cache:
            cache.save(keys_of(2), [0, 1]).wait_committed()
            with pytest.raises(LayoutError, match="keyspace_of"):
                ucm.blocking.open(config, layout=other, device=pool, keyspace=KEYSPACE)
            theirs = ucm.keyspace_of(
                other, model="m", weights="w", kv_dtype="uint8", engine="test"
            )
            keys = ucm.PrefixHasher(theirs, 16).keys([0, *range(1, 32)])
            assert 0 == cache.match(keys)

    @pytest.mark.parametrize("is_given", [True, False])
    def test_store_with_smaller_slots_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, *, is_given: bool
    ) -> None:
        """Before the first save fails; and it is closed, whoever opened it."""
        store = MemoryStore(4, LAYOUT.max_block_bytes - 1)
        monkeypatch.setattr(opening, "open_store", lambda *_, **__: store)
        given = store if is_given else None
        with pytest.raises(ConfigError, match="block_bytes"):
            ucm.blocking.open(
                {}, layout=LAYOUT, device=pool_of(), keyspace=KEYSPACE, store=given
            )
        with pytest.raises(StoreUnavailableError):
            store.stats()

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"config": {"stor": {}}}, ConfigError),
            ({"config": {"store": {"type": "memory"}}}, ConfigError),
            ({"device": {"a": np.zeros((4, 1), np.uint8)}}, LayoutError),
            ({"device": {}}, LayoutError),
            ({"device": dict.fromkeys(LAYERS, "text")}, LayoutError),
            ({"keyspace": attrs.evolve(KEYSPACE, block_tokens=8)}, LayoutError),
        ],
    )
    def test_what_cannot_be_opened_has_a_named_error(
        self, change: dict, error: type[Exception], tmp_path: Path
    ) -> None:
        """And nothing of ours runs behind it."""
        given = {
            "config": settings(tmp_path / "slab"),
            "layout": LAYOUT,
            "device": pool_of(),
            "keyspace": KEYSPACE,
            **change,
        }
        with pytest.raises(error):
            ucm.blocking.open(given.pop("config"), **given)
        assert set() == our_threads()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("config", None),
            ("config", "/etc/ucm.yaml"),
            ("layout", KEYSPACE),
            ("layout", None),
            ("device", [np.zeros((4, 64), np.uint8)]),
            ("device", None),
            ("keyspace", LAYOUT),
            ("keyspace", "model"),
            ("store", "/dev/shm/slab"),
            ("shard", "0"),
            ("shard", -1),
            ("shard", 1 << 16),
            ("before_commit", print),
        ],
    )
    def test_argument_of_another_kind_is_named(self, name: str, value: object) -> None:
        """R-41: two that were exchanged are an error of ours, which says what to give."""
        store = MemoryStore(4, LAYOUT.max_block_bytes)
        given: dict[str, Any] = {
            "config": {},
            "layout": LAYOUT,
            "device": pool_of(),
            "keyspace": KEYSPACE,
            "store": store,
            name: value,
        }
        with pytest.raises(ConfigError, match=rf"^{name}=.*: is n") as caught:
            ucm.blocking.open(given.pop("config"), **given)
        assert caught.value.remedy
        assert set() == our_threads()
        if name != "store":  # closed as if it had been opened
            with pytest.raises(StoreUnavailableError):
                store.stats()

    @pytest.mark.parametrize("device", [{}, dict.fromkeys(LAYERS, "text")])
    def test_what_is_no_memory_is_refused_where_torch_is_not(
        self, device: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A host without torch hears which layer, and not that torch is missing."""
        monkeypatch.setitem(sys.modules, "torch", None)
        config = settings(tmp_path / "slab")
        with pytest.raises(LayoutError, match=f"layer '{LAYERS[0]}'"):
            ucm.blocking.open(config, layout=LAYOUT, device=device, keyspace=KEYSPACE)

    def test_tensors_on_a_device_that_nobody_knows_are_refused(
        self, tmp_path: Path
    ) -> None:
        """By a named error, as all that cannot be opened."""
        torch = pytest.importorskip("torch")
        given = {"layout": LAYOUT, "keyspace": KEYSPACE}
        pool = {"a": torch.zeros(4, 4, device="meta")}
        with pytest.raises(ConfigError):
            ucm.blocking.open(settings(tmp_path / "slab"), device=pool, **given)
        assert set() == our_threads()

    def test_keys_of_another_key_space_are_never_found(self, tmp_path: Path) -> None:
        """Not even where a host mixes up its hashers."""
        config = settings(tmp_path / "slab")
        twin = attrs.evolve(KEYSPACE, weights="others")
        keys = HASHER.keys(range(32))
        with ucm.blocking.open(
            config, layout=LAYOUT, device=pool_of(), keyspace=KEYSPACE
        ) as cache:
            cache.save(keys, [0, 1]).wait_committed()
        with ucm.blocking.open(
            config, layout=LAYOUT, device=pool_of(), keyspace=twin
        ) as cache:
            assert 0 == cache.match(keys)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tiers": [{"type": "tape"}]}, "tiers.0.type"),
        ({"store": {"type": "null"}}, "only a slab has tiers"),
        ({}, "another one"),
    ],
)
def test_tiers_that_cannot_be_are_refused(
    change: dict, told: str, tmp_path: Path
) -> None:
    """X-09: a host hears of tiers that nobody knows, and of ones below another store."""
    config = settings(tmp_path / "slab") | {"tiers": [{"type": "disk"}]} | change
    store = MemoryStore(4, LAYOUT.max_block_bytes) if not change else None
    with pytest.raises(ConfigError, match=told):
        ucm.blocking.open(
            config, layout=LAYOUT, device=pool_of(), keyspace=KEYSPACE, store=store
        )
    assert set() == our_threads()


class SeenCpus(OwnStage):
    """Notes on which CPUs the thread that saves may run."""

    name = "seen_cpus"

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def run(self, given: Sealed) -> Sealed:
        """Note them."""
        self.seen |= os.sched_getaffinity(0)
        return given


class TestSettings:
    def test_copy_threads_run_on_the_cpus_that_are_set(self, tmp_path: Path) -> None:
        """And nothing else does: the host's own threads stay where they are."""
        mine = os.sched_getaffinity(0)
        assert {min(mine)} == self.cpus_of_saves(tmp_path, str(min(mine)))
        assert mine == os.sched_getaffinity(0)

    def test_copy_threads_stay_where_nothing_is_known_of_the_machine(
        self, tmp_path: Path
    ) -> None:
        """Memory of the host is near any CPU."""
        assert os.sched_getaffinity(0) == self.cpus_of_saves(tmp_path, "numa")

    def cpus_of_saves(self, path: Path, affinity: str) -> set[int]:
        """Save with a setting; return the CPUs that the saving thread had."""
        stage, config = SeenCpus(), settings(path / "slab")
        config["threads"] = {"affinity": affinity}
        with ucm.blocking.open(
            config,
            layout=LAYOUT,
            device=pool_of(),
            keyspace=KEYSPACE,
            before_commit=Chain.start(stage),
        ) as cache:
            assert cache.save(keys_of(1), [0]).wait_committed().is_whole
        return stage.seen

    def ignored(self, path: Path, config: object) -> dict[str, tuple[object, str]]:
        """Open and close a cache; return of which settings its log warns."""
        with ucm.blocking.open(
            config, layout=LAYOUT, device=pool_of(), keyspace=KEYSPACE
        ):
            pass
        (file,) = (path / "log").iterdir()
        lines = map(json.loads, file.read_text().splitlines())
        return {
            line["key"]: (line["value"], line["remedy"])
            for line in lines
            if line["event"] == SETTING_IGNORED and line["level"] == "warning"
        }

    def test_setting_of_engines_is_warned_of(self, tmp_path: Path) -> None:
        """By key and value, if it would change anything; of weights with what to do."""
        config = settings(tmp_path / "slab") | {
            "log": {"directory": str(tmp_path / "log")},
            "weights_revision": "abc",
            "save_decoded": "never",
            "use_layerwise": False,
            "timeout": {"fence": 1.0, "load": 5.0},
        }
        told = self.ignored(tmp_path, config)
        assert {"weights_revision", "save_decoded", "timeout.fence"} == set(told)
        assert "never" == told["save_decoded"][0]
        assert "keyspace_of(weights=" in told["weights_revision"][1]

    def test_settings_that_somebody_has_read_are_not_looked_at(
        self, tmp_path: Path
    ) -> None:
        """A door has heeded what is for engines before it opens the library."""
        config = settings(tmp_path / "slab") | {
            "log": {"directory": str(tmp_path / "log")},
            "weights_revision": "abc",
        }
        assert {} == self.ignored(tmp_path, UCMConfig.from_mapping(config))

    def test_each_setting_of_engines_exists(self) -> None:
        """Under the name that the table of settings has."""
        assert ENGINES_ONLY <= flat(UCMConfig()).keys()
