# SPDX-License-Identifier: Apache-2.0
"""Mutants of the doors to transformers: what is a model's own, and continuous batching."""

from tests.mutations.mutant import Mutant

__all__ = ["CB"]

_FILE = "ucm/integration/transformers/continuous.py"
_MODEL = "ucm/integration/transformers/model.py"
_MODELS = "tests/integration/transformers/test_model.py"
_SPACES = f"{_MODELS}::TestKeySpace::test_whatever_decides_the_states_makes_another"
_PRECISION = "tests/integration/transformers/test_dynamic.py::TestAutocast"
_TESTS = "tests/integration/transformers/test_continuous.py"
_DOOR = "tests/integration/transformers/test_continuous_contract.py::TestContinuousDoor"
_EXACT = f"{_TESTS}::TestExact"
_SHARED = f"{_EXACT}::test_every_number_of_loaded_blocks_gives_the_same_tokens[fp32]"
_KEYS = f"{_TESTS}::TestKeys"
_TWINS = f"{_KEYS}::test_equal_hashes_of_other_tokens_load_and_store_nothing_wrong"
_OTHERS = f"{_KEYS}::test_other_salt_and_other_ways_to_compute_find_nothing"
_REFUSED = f"{_TESTS}::TestRefusals"
_SLOTS = f"{_TESTS}::TestSlots"
_DROPPED = f"{_SLOTS}::test_blocks_without_slots_are_counted_and_slots_come_back"

CB = (
    Mutant(
        name="autocast_of_nobody",
        why="A model that computes in bfloat16 goes on with states that it never computes.",
        file=_MODEL,
        find='| ({"autocast": str(cast)} if cast else {})',
        replace="| {}",
        killers=(
            f"{_SPACES}[autocast]",
            f"{_PRECISION}::test_states_of_other_precision_are_not_found",
        ),
    ),
    Mutant(
        name="autocast_at_the_start_alone",
        why="States of one precision are stored as those of another.",
        file="ucm/integration/transformers/dynamic.py",
        find="if (now := autocast_of(self._shape.device.type)) != self._autocast:",
        replace="if (now := self._autocast) != self._autocast:",
        killers=(f"{_PRECISION}::test_verb_under_another_autocast_is_refused",),
    ),
    Mutant(
        name="autocast_of_the_loop_forgotten",
        why="A cache that was opened under autocast has keys of one that was not.",
        file="ucm/integration/transformers/awaiting.py",
        find="if (cast := autocast_of(self._kind)) is None:",
        replace="if (cast := autocast_of(self._kind)) is not self:",
        killers=(
            "tests/integration/transformers/test_awaiting.py::TestAwaiting::test_autocast_of_the_loop_is_that_of_its_verbs",
        ),
    ),
    Mutant(
        name="hook_of_a_stranger",
        why="A model that is steered goes on with states of one that is not.",
        file=_MODEL,
        find="    _check_hooks(model)\n",
        replace="",
        killers=(f"{_MODELS}::TestRefusals::test_model_with_hooks_is_refused",),
    ),
    Mutant(
        name="forward_of_its_class",
        why="A model of which a part was replaced goes on with states of the whole one.",
        file=_MODEL,
        find='types.update(f"{name} forward {who}\\n".encode())',
        replace="pass",
        killers=(f"{_SPACES}[forward]",),
    ),
    Mutant(
        name="compiled_model_itself",
        why="It is refused as one that counts padding.",
        file=_MODEL,
        find='    model = getattr(model, "_orig_mod", model)\n',
        replace="",
        killers=(
            f"{_MODELS}::TestKeySpace::test_compiled_model_is_that_whose_generate_it_has",
        ),
    ),
    Mutant(
        name="any_release_wrapped",
        why="Methods that no release promises are taken for those that are known.",
        file=_FILE,
        find="if transformers.__version__ != _RELEASE:",
        replace="if not transformers.__version__:",
        killers=(f"{_REFUSED}::test_other_release_is_refused",),
    ),
    Mutant(
        name="batches_under_way_taken",
        why="A block is copied while a batch that is under way may write to it.",
        file=_FILE,
        find="if manager.continuous_batching_config.use_async_batching:",
        replace="if False:",
        killers=(f"{_REFUSED}::test_setting_of_the_manager_is_refused[settings0]",),
    ),
    Mutant(
        name="loaded_by_the_engines_hash",
        why="Behind a block of other tokens with the same hash, blocks are loaded.",
        file=_FILE,
        find='self._names.get(block, (b"", b""))[1] != keys[at] for block, at in there',
        replace="not keys[at] for block, at in there",
        killers=(f"{_TWINS}[0-12]", f"{_TWINS}[1-6]"),
    ),
    Mutant(
        name="saved_behind_blocks_of_others",
        why="What was computed behind another prompt's block has this prompt's key.",
        file=_FILE,
        find="            if parent != before:  # of other tokens: see ``_restore``\n",
        replace="            if parent is None:\n",
        killers=(f"{_TWINS}[1-6]",),
    ),
    Mutant(
        name="salt_of_a_manager_forgotten",
        why="A tenant finds the blocks of another one.",
        file=_FILE,
        find='salt = b"" if before else self._salt',
        replace='salt = b""',
        killers=(_OTHERS,),
    ),
    Mutant(
        name="blocks_named_as_those_of_generate",
        why="Bytes in another order, by other kernels, are taken for a prompt's states.",
        file=_FILE,
        find="manager.model, block_tokens=tokens, weights=weights, form=_FORM",
        replace="manager.model, block_tokens=tokens, weights=weights",
        killers=(_OTHERS,),
    ),
    Mutant(
        name="more_loaded_than_there_is_room_for",
        why="The engine's thread ends: there is no sector to take.",
        file=_FILE,
        find="if not missing or len(missing) >= self._num_free():",
        replace="if not missing:",
        killers=(
            f"{_EXACT}::test_request_that_waits_for_room_is_loaded_when_it_has_it",
        ),
    ),
    Mutant(
        name="published_without_its_bytes",
        why="A loaded block has what was in the engine's pool before.",
        file=_FILE,
        find="            self._copy(self._blocks, blocks, self._slots, slots)\n",
        replace="            pass\n",
        killers=(_SHARED, f"{_DOOR}::test_cold_and_warm_answers_are_exact"),
    ),
    Mutant(
        name="published_blocks_kept_for_ever",
        why="Blocks that no request has are never given back.",
        file=_FILE,
        find="            ledger.cached_blocks[block] = None\n",
        replace="",
        killers=(f"{_DOOR}::test_cold_and_warm_answers_are_exact",),
    ),
    Mutant(
        name="staged_blocks_held_for_ever",
        why="Slots fill up with blocks that cannot be replaced.",
        file=_FILE,
        find="            self._staged.release(held)\n",
        replace="            pass\n",
        killers=(f"{_SLOTS}::test_long_prompt_is_loaded_in_parts",),
    ),
    Mutant(
        name="patience_without_end",
        why="One request that waits for a store holds up all of them.",
        file=_FILE,
        find="max(until - time.monotonic(), 0)",
        replace="60.0",
        killers=(
            f"{_TESTS}::TestPatience::test_store_that_is_given_no_time_costs_none",
        ),
    ),
    Mutant(
        name="slots_of_saves_used_up",
        why="After some prompts nothing is saved any more.",
        file=_FILE,
        find="        save.when_over(partial(self._free.extend, slots))",
        replace="        save.when_over(partial(len, slots))",
        killers=(_DROPPED,),
    ),
    Mutant(
        name="dropped_blocks_uncounted",
        why="Nobody learns why a prompt is computed again and again.",
        file=_FILE,
        find="self.dropped_blocks += len(own) - len(slots)",
        replace="self.dropped_blocks += 0",
        killers=(_DROPPED,),
    ),
    Mutant(
        name="name_of_a_former_block_kept",
        why="A block that was given to other tokens is still known as what it was.",
        file=_FILE,
        find="            self._names.pop(block, None)\n",
        replace="            assert block >= 0\n",
        killers=(f"{_KEYS}::test_name_of_a_block_ends_with_what_it_was",),
    ),
    Mutant(
        name="closed_and_still_wrapped",
        why="An engine goes on asking a cache that is closed.",
        file=_FILE,
        find="        self._paged.search_prefix_match = self._search\n",
        replace="",
        killers=(f"{_TESTS}::TestEnds::test_engine_goes_on_behind_a_close",),
    ),
    Mutant(
        name="copy_without_memory_ends_the_engine",
        why="A device that is full ends all requests, for a hit.",
        file=_FILE,
        find="_OURS: Final = (UCMError, RuntimeError)",
        replace="_OURS: Final = (UCMError,)",
        killers=(
            f"{_TESTS}::TestSlots::test_device_without_memory_for_a_copy_costs_hits_only",
        ),
    ),
    Mutant(
        name="blocks_of_a_copy_that_failed_stay_taken",
        why="The engine's pool loses blocks for good.",
        file=_FILE,
        find="            self._allocator.pool.free_blocks(self._allocator.index, blocks)\n",
        replace="",
        killers=(
            f"{_TESTS}::TestSlots::test_device_without_memory_for_a_copy_costs_hits_only",
        ),
    ),
)
