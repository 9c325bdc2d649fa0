# SPDX-License-Identifier: Apache-2.0
"""Mutants of how often the bytes of a block are held against its checksum."""

from tests.mutations.mutant import Mutant

__all__ = ["LEASE"]

_LEASES = "ucm/stores/slab/_leases.py"
_VERIFY = "tests/stores/test_slab_verify.py::TestVerify"
_ANEW = f"{_VERIFY}::test_block_that_was_saved_anew_is_verified_anew"
_CONFIGURED = f"{_VERIFY}::test_slab_verifies_as_it_is_configured"
_DAMAGED = f"{_VERIFY}::test_damaged_block_stays_damaged"
_PIECE = f"{_VERIFY}::test_piece_of_a_span_vouches_for_no_other"
_SECOND = f"{_VERIFY}::test_second_load_hashes_what_the_first_did_not"

LEASE = (
    Mutant(
        name="slot_verified_for_ever",
        why="A slot's next block is believed because of the last one, damaged or not.",
        file=_LEASES,
        find="        doubtful = known != self._sighting.generations[start:stop]\n",
        replace="        doubtful = known == 0\n",
        killers=(_ANEW,),
    ),
    Mutant(
        name="damaged_block_counts_as_verified",
        why="A block that failed to verify is loaded by the next request.",
        file=_LEASES,
        find="        digests = digests_of(self.slots, doubtful, seeds, self._slab.most_hashing)\n",
        replace="        digests = digests_of(self.slots, doubtful, seeds, self._slab.most_hashing)\n"
        "        if self._verified is not None:\n"
        "            part = self.slots.slots[start:stop]\n"
        "            self._verified[part] = self._sighting.generations[start:stop]\n",
        killers=(_DAMAGED,),
    ),
    Mutant(
        name="piece_vouches_for_its_span",
        why="Pieces of a load behind the first are never looked at.",
        file=_LEASES,
        find="            part = slice(start, stop)\n",
        replace="            part = slice(None)\n",
        killers=(_PIECE,),
    ),
    Mutant(
        name="another_piece_verified",
        why="A piece is copied unverified, and the first one hashed instead.",
        file=_LEASES,
        find="(doubtful.nonzero()[0] + start)",
        replace="(doubtful.nonzero()[0])",
        killers=(_PIECE,),
    ),
    Mutant(
        name="verified_again_and_again",
        why="Who asked to verify once pays for it each time.",
        file=_LEASES,
        find="            self._verified[slots] = self._sighting.generations[part]\n",
        replace="            pass\n",
        killers=(_SECOND,),
    ),
    Mutant(
        name="trusted_unless_told_otherwise",
        why="Memory that flips a bit becomes the model's context, and nobody asked for it.",
        file="ucm/config.py",
        find="        Verify.ALWAYS,\n",
        replace="        Verify.ONCE,\n",
        killers=(_CONFIGURED,),
    ),
    Mutant(
        name="verify_setting_ignored",
        why="Who asked to verify once pays for it each time, and is not told.",
        file="ucm/stores/slab/_store.py",
        find="            verify=config.verify,\n",
        replace="",
        killers=(_CONFIGURED,),
    ),
    Mutant(
        name="scheduler_remembers_what_it_never_loads",
        why="A number for each slot in a process that has no slots.",
        file="ucm/stores/slab/_store.py",
        find="        if verify is Verify.ONCE and not index_only:\n",
        replace="        if verify is Verify.ONCE:\n",
        killers=(f"{_VERIFY}::test_memory_is_a_number_for_each_slot_of_who_loads",),
    ),
)
