# SPDX-License-Identifier: Apache-2.0
"""The unreliable store: what it does to blocks, somebody is there to notice."""

from tests.kit.simulation import Simulation
from tests.kit.unreliable import Odds, SeededFaults, UnreliableStore
from tests.rig import keys_of
from ucm.errors import BlockCorruptError
from ucm.stores.memory import MemoryStore


def read_abreast(seed):
    """Have two threads read one block of a store that rots; return who saw it rot."""
    simulation, seen = Simulation(seed), []
    inner, keys = MemoryStore(1, 64), keys_of(1)
    with inner.reserve(keys, 64) as written:
        written.seal(0, 1)
        written.commit()

    def flip(key):
        entry = inner._entries[key]
        inner._pool[entry.slot, 0] ^= 1

    faults = SeededFaults(simulation, Odds(damage=0.5))
    store = UnreliableStore(inner, faults, flip, simulation)

    def read():
        with store.read(keys) as lease:
            try:
                lease.verify(0, 1)
            except BlockCorruptError:
                seen.append("before")
                return
            simulation.pause()
            try:
                lease.verify(0, 1)
            except BlockCorruptError:
                seen.append("meanwhile")

    def main():
        threads = [simulation.threads.thread(read, name) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    simulation.run(main)
    return seen


class TestUnreliableStore:
    def test_no_block_rots_behind_the_look_of_one_who_reads_it(self):
        """S1-10: whatever runs in between, a block is damaged before it is verified, or
        not at all: what rots in the middle of a copy nobody could notice."""
        seen = [read_abreast(seed) for seed in range(60)]
        assert [] == [each for each in seen if "meanwhile" in each]
        assert any("before" in each for each in seen)
