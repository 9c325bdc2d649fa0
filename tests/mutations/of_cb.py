# SPDX-License-Identifier: Apache-2.0
"""Mutants of the doors to transformers: what is a model's own, and continuous batching."""

from tests.mutations.mutant import Mutant

__all__ = ["CB"]

_FILE = "ucm/integration/transformers/continuous.py"
_COMPUTING = "ucm/integration/computing.py"
_MODEL = "ucm/integration/transformers/model.py"
_MODELS = "tests/integration/transformers/test_model.py"
_SPACES = f"{_MODELS}::TestKeySpace::test_whatever_decides_the_states_makes_another"
_OTHERWISE = f"{_MODELS}::TestKeySpace::test_whatever_computes_otherwise_makes_another"
_SPREAD = f"{_MODELS}::TestKeySpace::test_hooks_that_move_tensors_make_no_other"
_HOOKS = f"{_MODELS}::TestRefusals::test_model_with_hooks_is_refused"
_AWAITING = "tests/integration/transformers/test_awaiting.py::TestAwaiting"
_CAUSAL = "tests/integration/transformers/test_dynamic.py::TestCausal"
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
_ROOM = "tests/integration/transformers/test_continuous_room.py::TestRoom"
_DROPPED = f"{_SLOTS}::test_blocks_without_slots_are_counted_and_slots_come_back"

CB = (
    Mutant(
        name="code_of_parts_of_nobody",
        why="A part of the same name that computes otherwise finds states that it never computes.",
        file=_MODEL,
        find='{"parts": parts}',
        replace="{}",
        killers=(f"{_SPACES}[part]",),
    ),
    Mutant(
        name="autocast_of_nobody",
        why="A model that computes in bfloat16 goes on with states that it never computes.",
        file=_MODEL,
        find='"autocast": str(cast)}',
        replace="}",
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
        name="model_that_looks_ahead_saved",
        why="Tokens that were computed with those behind them are found as if without.",
        file="ucm/integration/transformers/dynamic.py",
        find='if (now := getattr(self._config, "is_causal", None)) != self._is_causal:',
        replace="if (now := self._is_causal) != self._is_causal:",
        killers=(
            f"{_CAUSAL}::test_states_of_a_model_that_looks_ahead_by_now_are_refused",
        ),
    ),
    Mutant(
        name="autocast_of_the_loop_forgotten",
        why="A cache that was opened under autocast has keys of one that was not.",
        file="ucm/integration/transformers/awaiting.py",
        find="            with casting(casts):\n",
        replace="            if casts:\n",
        killers=(
            f"{_AWAITING}::test_autocast_of_the_loop_is_that_of_its_verbs",
            f"{_AWAITING}::test_autocast_is_that_of_where_the_states_are",
        ),
    ),
    Mutant(
        name="autocast_of_another_thread",
        why="A manager that was opened under autocast has keys of what it never computes.",
        file=_FILE,
        find="        with casting(dict.fromkeys(casts_here())):",
        replace="        with casting({}):",
        killers=(f"{_KEYS}::test_autocast_where_it_is_opened_counts_for_nothing",),
    ),
    Mutant(
        name="hook_of_a_stranger",
        why="A model that is steered goes on with states of one that is not.",
        file=_MODEL,
        find="    _check_hooks(model)",
        replace="    pass",
        killers=(f"{_HOOKS}[behind]", f"{_HOOKS}[before]"),
    ),
    Mutant(
        name="hook_of_the_first_call",
        why="A model that gets ready as it is first called is refused.",
        file=_MODEL,
        find="    _check_kind(model)\n    shape = observe(model)\n",
        replace="    _check_kind(model)\n    _check_hooks(model)\n    shape = observe(model)\n",
        killers=(
            f"{_MODELS}::TestRefusals::test_hook_that_goes_with_the_first_call_is_taken",
        ),
    ),
    Mutant(
        name="hook_on_all_modules",
        why="What is called behind each module of the process is looked for nowhere.",
        file=_COMPUTING,
        find="            *everywhere._global_forward_hooks.values(),  # noqa: SLF001 - no other name\n",
        replace="",
        killers=(f"{_HOOKS}[each]",),
    ),
    Mutant(
        name="hook_before_all_modules",
        why="What is called before each module of the process is looked for nowhere.",
        file=_COMPUTING,
        find="            *everywhere._global_forward_pre_hooks.values(),  # noqa: SLF001 - no other name\n",
        replace="",
        killers=(f"{_HOOKS}[any]",),
    ),
    Mutant(
        name="hook_of_a_stranger_among_several",
        why="A stranger's hook that accelerate calls is taken for one of its own.",
        file=_COMPUTING,
        find='several = getattr(hook, "hooks", ())',
        replace="several = ()",
        killers=(f"{_HOOKS}[accelerate]",),
    ),
    Mutant(
        name="hook_of_compressed_tensors",
        why="A model whose keys and values have scales is refused.",
        file=_MODEL,
        find='    "compressed_tensors.",\n',
        replace="",
        killers=(f"{_MODELS}::TestRefusals::test_compressed_model_is_taken[4]",),
    ),
    Mutant(
        name="hook_with_arguments",
        why="A library's hook is refused for what holds its arguments.",
        file=_COMPUTING,
        find="    while isinstance(called, functools.partial):",
        replace="    while called is functools.partial:",
        killers=(
            f"{_MODELS}::TestRefusals::test_function_of_a_library_with_arguments_is_known",
        ),
    ),
    Mutant(
        name="forward_of_its_class",
        why="A model of which a part was replaced goes on with states of the whole one.",
        file=_COMPUTING,
        find='types.update(f"{name} {each}\\n".encode())',
        replace="pass",
        killers=(f"{_OTHERWISE}[part]", f"{_OTHERWISE}[class]"),
    ),
    Mutant(
        name="class_with_the_forward_of_a_stranger",
        why="A model whose class was patched goes on with states of one that was not.",
        file=_COMPUTING,
        find="return None if is_its else plain",
        replace="return None",
        killers=(f"{_OTHERWISE}[class]",),
    ),
    Mutant(
        name="forward_that_accelerate_calls",
        why="What was replaced below a hook that moves tensors is in no key.",
        file=_COMPUTING,
        find='own = vars(module).get("_old_forward")',
        replace="own = None",
        killers=(_SPREAD,),
    ),
    Mutant(
        name="forward_of_accelerate",
        why="A model that is spread finds nothing of what it computed as a whole.",
        file=_COMPUTING,
        find='if _made_in(own).startswith("accelerate."):',
        replace='if _made_in(own).startswith("nobody."):',
        killers=(_SPREAD,),
    ),
    Mutant(
        name="compiled_in_place",
        why="A model that computes with what was compiled goes on with states of one that does not.",
        file=_COMPUTING,
        find="if module._compiled_call_impl is not None:",
        replace="if module is None:",
        killers=(f"{_OTHERWISE}[layer]",),
    ),
    Mutant(
        name="compiled_as_a_whole",
        why="Who calls what was compiled stores that as what was not.",
        file=_MODEL,
        find='| ({"compiled": True} if given is not model else {})',
        replace="| {}",
        killers=(f"{_OTHERWISE}[compiled]",),
    ),
    Mutant(
        name="compiled_model_itself",
        why="It is refused as one that counts padding.",
        file=_MODEL,
        find='    given, model = model, getattr(model, "_orig_mod", model)\n',
        replace="    given = model\n",
        killers=(f"{_OTHERWISE}[compiled]",),
    ),
    Mutant(
        name="any_release_wrapped",
        why="Methods that no release promises are taken for those that are known.",
        file=_FILE,
        find='if not _FIRST <= tuple(map(int, re.findall(r"\\d+", version)[:2])) <= _LAST:',
        replace="if not version:",
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
        find="            if room < 1:  # one",
        replace="            if room < -len(ids):  # one",
        killers=(f"{_ROOM}::test_prompt_that_finds_no_room_is_hashed_no_further",),
    ),
    Mutant(
        name="idle_blocks_kept_from_a_load",
        why="A pool that is full of what it may forget has a stored prompt computed.",
        file=_FILE,
        find="room = free + len(idle)",
        replace="room = free",
        killers=(f"{_ROOM}::test_idle_blocks_of_others_give_way_to_a_load",),
    ),
    Mutant(
        name="own_blocks_forgotten_for_a_load",
        why="What the engine has of a prompt is loaded again, or computed.",
        file=_FILE,
        find="        for block in kept:\n            ledger.acquire(block)\n",
        replace="        kept = []\n",
        killers=(f"{_ROOM}::test_idle_blocks_of_others_give_way_to_a_load",),
    ),
    Mutant(
        name="no_room_left_for_a_batch",
        why="A request holds what is loaded, and waits for blocks of a batch that others hold.",
        file=_FILE,
        find="len(missing) + 1 - batch)",
        replace="len(missing))",
        killers=(f"{_ROOM}::test_prompt_is_loaded_as_far_as_there_is_room",),
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
        name="last_token_of_several_answers_alone",
        why="A forward pass over no token ends the engine, at each start anew.",
        file=_FILE,
        find="            prompt_ids = prompt_ids[:-1]\n",
        replace="            prompt_ids = prompt_ids[:]\n",
        killers=(
            f"{_EXACT}::test_prompt_with_several_answers_has_two_tokens_to_compute",
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
    Mutant(
        name="experts_are_computed_anyhow",
        why="Models whose experts are computed otherwise load each other's states.",
        file=_MODEL,
        find='{"experts": experts} if experts not in (None, "eager") else {}',
        replace="{}",
        killers=(
            f"{_MODELS}::TestKeySpace::test_whatever_decides_the_states_makes_another[experts]",
        ),
    ),
)
