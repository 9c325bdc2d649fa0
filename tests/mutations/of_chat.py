# SPDX-License-Identifier: Apache-2.0
"""Mutants of the door to transformers, and of the chat server that stands on it."""

from tests.mutations.mutant import Mutant

__all__ = ["CHAT"]

_DOOR = "ucm/integration/transformers"
_COMPUTING = "ucm/integration/computing.py"
_CODE = "tests/integration/test_computing.py::TestCode::test"
_DYNAMIC = f"{_DOOR}/dynamic.py"
_MODEL = f"{_DOOR}/model.py"
_PROMPTS = f"{_DOOR}/prompts.py"
_STAGING = f"{_DOOR}/staging.py"
_SERVER = "examples/chat_server/chat.py"
_TESTS = "tests/integration/transformers"
_EXACT = f"{_TESTS}/test_dynamic.py::TestExact"
_FOUND = f"{_TESTS}/test_dynamic.py::TestFound"
_MISTAKES = f"{_TESTS}/test_dynamic.py::TestMistakes"
_KEYS = f"{_TESTS}/test_model.py::TestKeySpace::test_whatever_decides_the_states_makes_another"
_OTHERWISE = f"{_TESTS}/test_model.py::TestKeySpace::test_whatever_computes_otherwise_makes_another"
_REFUSED = f"{_TESTS}/test_model.py::TestRefusals"
_NO_PREFIX = f"{_REFUSED}::test_model_whose_states_are_no_prefix_is_refused"
_NO_BATCH = f"{_MISTAKES}::test_prompt_that_is_no_batch_is_refused"
_LIMITS = "tests/examples/test_chat.py::TestLimits"

CHAT = (
    Mutant(
        name="one_token_alone_restored",
        why="A prompt that is computed anew behind it is saved as another.",
        file=_DYNAMIC,
        find="default=columns) + 1",
        replace="default=columns)",
        killers=(
            f"{_TESTS}/test_dynamic.py::TestExact::test_one_token_alone_is_not_restored",
        ),
    ),
    Mutant(
        name="code_of_attention_of_nobody",
        why="What is registered under a known name finds states that it never computes.",
        file=_MODEL,
        find="code_of(model, *seen)",
        replace="code_of(model, *seen[1:])",
        killers=(f"{_OTHERWISE}[Attention]",),
    ),
    Mutant(
        name="code_of_masks_of_nobody",
        why="States of tokens that saw others are found under a mask of somebody's own.",
        file=_MODEL,
        find="code_of(model, *seen)",
        replace="code_of(model, *seen[:1])",
        killers=(f"{_OTHERWISE}[AttentionMask]",),
    ),
    Mutant(
        name="code_of_a_wrapper_by_its_name",
        why="What wraps attention, and changes it, finds states that it never computes.",
        file=_COMPUTING,
        find='names.get("__name__") or _made_in(kind)',
        replace="_made_in(kind)",
        killers=(f"{_CODE}_function_of_others_is_found_whatever_name_it_bears",),
    ),
    Mutant(
        name="code_behind_a_wrapper_unread",
        why="A decorator of torch hides whose function it is.",
        file=_COMPUTING,
        find='_unwrapped(getattr(called, "__wrapped__", None))',
        replace="None",
        killers=(f"{_CODE}_function_of_others_is_found_whatever_name_it_bears",),
    ),
    Mutant(
        name="code_of_torch_jit_unread",
        why="Two parts that torch compiled have one class, and find each other's states.",
        file=_COMPUTING,
        find="isinstance(part, torch.jit.ScriptModule)",
        replace="part is None",
        killers=(f"{_CODE}_what_torch_has_compiled_by_itself_is_refused",),
    ),
    Mutant(
        name="save_of_no_tensor_looked_into",
        why="A list of tokens is an AttributeError of ours, and no word of what is wrong.",
        file=_DYNAMIC,
        find="        check_batch(input_ids, attention_mask)\n",
        replace="",
        killers=(f"{_MISTAKES}::test_what_is_no_tensor_is_refused",),
    ),
    Mutant(
        name="whole_prompt_restored",
        why="There is nothing left to compute, of which the first new token would come.",
        file=_DYNAMIC,
        find="columns = input_ids.shape[1] - 1",
        replace="columns = input_ids.shape[1]",
        killers=(f"{_FOUND}::test_last_token_is_never_restored",),
    ),
    Mutant(
        name="match_believed_of_a_load",
        why="Blocks that could not be loaded are zeros in the model's cache.",
        file=_DYNAMIC,
        find="columns = min(columns, row.padding + loaded * self._tokens)",
        replace="assert loaded >= 0",
        killers=(f"{_EXACT}::test_damaged_blocks_are_computed",),
    ),
    Mutant(
        name="padding_ignored_by_loads",
        why="A batch's shorter rows have their tokens in columns of padding.",
        file=_DYNAMIC,
        find="begin = row.padding + first * self._tokens",
        replace="begin = first * self._tokens",
        killers=(f"{_EXACT}::test_batch_with_shared_beginnings_is_exact",),
    ),
    Mutant(
        name="stuck_lane_used_again",
        why="A copy that goes on writes into blocks of the next prompt.",
        file=_DYNAMIC,
        find="                lane.is_lost = True\n                break\n",
        replace="                break\n",
        killers=(
            f"{_TESTS}/test_staging.py::TestStuck::test_copy_that_never_ends_loses_its_lane_and_raises_nothing[load]",
        ),
    ),
    Mutant(
        name="lost_lane_given_back",
        why="Prompts find nothing for want of a lane while others are free.",
        file=_STAGING,
        find="            if not lane.is_lost:\n",
        replace="            if True:\n",
        killers=(
            f"{_TESTS}/test_staging.py::TestLanes::test_lost_lane_is_never_handed_out_again",
        ),
    ),
    Mutant(
        name="keys_where_values_are",
        why="Values overwrite what was staged of keys.",
        file=_STAGING,
        find="                at = stop\n",
        replace="            at = stop\n",
        killers=(f"{_TESTS}/test_staging.py::TestCopies::test_what_goes_in_comes_out",),
    ),
    Mutant(
        name="gradients_kept_in_the_pool",
        why="Each save of a training loop keeps its graph for ever.",
        file=_STAGING,
        find="each.detach()[row, :, first:stop]",
        replace="each[row, :, first:stop]",
        killers=(
            f"{_TESTS}/test_staging.py::TestCopies::test_states_that_have_gradients_leave_none_behind",
        ),
    ),
    Mutant(
        name="restored_for_any_salt",
        why="A tenant finds the prompts of another one.",
        file=_PROMPTS,
        find="hasher.keys(tokens[padding:columns], salt=salt)",
        replace="hasher.keys(tokens[padding:columns])",
        killers=(f"{_FOUND}::test_other_salt_weights_and_settings_find_nothing",),
    ),
    Mutant(
        name="padding_hashed",
        why="The same prompt is another one in a batch.",
        file=_PROMPTS,
        find="hasher.keys(tokens[padding:columns], salt=salt)",
        replace="hasher.keys(tokens[:columns], salt=salt)",
        killers=(f"{_EXACT}::test_batch_with_shared_beginnings_is_exact",),
    ),
    Mutant(
        name="holes_in_a_mask_taken_for_padding",
        why="A prompt's tokens are stored under the keys of others.",
        file=_PROMPTS,
        find="if (~tokens).cumprod(dim=1).sum(dim=1).ne(paddings).any():",
        replace="if False:",
        killers=(f"{_NO_BATCH}[holes]", f"{_NO_BATCH}[right]"),
    ),
    Mutant(
        name="weights_unread",
        why="A model that was trained further is given states of its former weights.",
        file=_MODEL,
        find="weights=weights or _weights_of(model),",
        replace='weights=weights or "any",',
        killers=(f"{_KEYS}[weight]", f"{_KEYS}[recipe]"),
    ),
    Mutant(
        name="code_of_models_ignored",
        why="A class of the same name computes other states.",
        file=_MODEL,
        find='"code": code,',
        replace='"code": "",',
        killers=(f"{_KEYS}[code]",),
    ),
    Mutant(
        name="window_taken_for_all_tokens",
        why="Blocks are cut out of a window that has moved on.",
        file=_MODEL,
        find="if type(layer) is not DynamicLayer or",
        replace="if not isinstance(layer, DynamicLayer) or",
        killers=(f"{_NO_PREFIX}[gemma3-]", f"{_NO_PREFIX}[mistral-]"),
    ),
    Mutant(
        name="rotation_by_length_believed",
        why="Keys of a long prompt are found by a short one.",
        file=_MODEL,
        find="        if kind not in _LENGTH_FREE:\n",
        replace="        if not kind:\n",
        killers=(f"{_NO_PREFIX}[llama-longrope-]",),
    ),
    Mutant(
        name="attention_believed_causal",
        why="States of a prefix are those of another continuation.",
        file=_MODEL,
        find="if not all(_is_same(*each[:, :, 0]) for each in states):",
        replace="if not states:",
        killers=(f"{_REFUSED}::test_model_that_looks_ahead_is_refused",),
    ),
    Mutant(
        name="padding_believed_nothing",
        why="Rows of a padded batch are stored under the keys of the same tokens alone.",
        file=_MODEL,
        find='            raise _refused("positions"',
        replace='            continue\n            raise _refused("positions"',
        killers=(f"{_REFUSED}::test_model_that_counts_padding_is_refused",),
    ),
    Mutant(
        name="rounded_frequencies_are_the_same",
        why="R-05: a model moved to another type finds the keys of one loaded in it.",
        file=_COMPUTING,
        find='            if f"{name}.{key}".lstrip(".") not in stored:\n',
        replace="            if False:\n",
        killers=(
            "tests/integration/transformers/test_model.py::TestKeySpace::test_whatever_decides_the_states_makes_another[frequencies]",
        ),
    ),
    Mutant(
        name="any_cache_saved",
        why="States of another shape are stored under a prompt's keys.",
        file=_DYNAMIC,
        find="if found != wanted or where != {(shape.dtype, shape.device)}:",
        replace="if len(found) != len(wanted):",
        killers=(
            f"{_MISTAKES}::test_cache_of_something_else_is_refused[type]",
            f"{_MISTAKES}::test_cache_of_something_else_is_refused[batch]",
        ),
    ),
    Mutant(
        name="line_without_end",
        why="A server under load answers nobody in time.",
        file=_SERVER,
        find="if self._num_asked >= self.limits.line:",
        replace="if False:",
        killers=(f"{_LIMITS}::test_line_that_is_full_refuses_at_once",),
    ),
    Mutant(
        name="deadline_from_its_turn",
        why="Who waits in line waits for ever.",
        file=_SERVER,
        find="with anyio.fail_after(self.limits.deadline):",
        replace="with anyio.fail_after(None):",
        killers=(f"{_LIMITS}::test_request_that_waits_too_long_is_told",),
    ),
    Mutant(
        name="saves_without_bound",
        why="A slow store fills a server's memory with caches that wait.",
        file=_SERVER,
        find="            self._unsaved.inc()\n            return\n",
        replace="            pass\n",
        killers=(f"{_LIMITS}::test_answer_without_room_to_save_is_right_and_counted",),
    ),
)
