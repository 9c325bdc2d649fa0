# SPDX-License-Identifier: Apache-2.0
"""Mutants of the library and of doors, where somebody goes away or fails in a way of its own."""

from tests.mutations.mutant import Mutant

__all__ = ["INTERRUPTS"]

_SYNC = "ucm/cache/sync.py"
_STAGING = "tests/integration/transformers/test_staging.py::"
_FORKED = "tests/cache/test_forked.py"
_RESET = "tests/integration/vllm/test_tier_trouble.py::TestReset::"
_STAGED = "tests/cache/test_staged.py::TestStaged::"
_CHAT = "tests/examples/test_chat.py::"
_MISTAKES = "tests/cache/test_mistakes.py::TestMistakes::"
_BLOCKING = "tests/cache/test_blocking.py::TestMistakes::"

INTERRUPTS = (
    Mutant(
        name="error_of_a_store_goes_to_the_host",
        why="An engine's step ends with an exception that only the store's author knows.",
        file="ucm/cache/questions.py",
        find="answer.end(None, _unavailable(exc))",
        replace="answer.end(None, exc)",
        killers=(f"{_BLOCKING}test_store_that_raises_anything_has_nothing",),
    ),
    Mutant(
        name="questions_without_a_bound",
        why="A store that hangs keeps the keys of all that was ever asked.",
        file="ucm/cache/questions.py",
        find="if len(self._asked) >= _MOST:",
        replace="if False:",
        killers=(
            "tests/cache/test_questions.py::test_questions_that_wait_are_bounded",
        ),
    ),
    Mutant(
        name="late_question_waits_for_a_store_that_hangs",
        why="Whoever asks while another thread closes waits as long as the store hangs.",
        file="ucm/cache/questions.py",
        find="        if self._is_over:  # perhaps",
        replace="        if False:  # perhaps",
        killers=(
            (
                "tests/cache/test_questions.py::"
                "test_question_to_a_store_that_hangs_has_an_answer_behind_the_close"
            ),
        ),
    ),
    Mutant(
        name="interrupted_load_goes_on",
        why="It writes to blocks that the host has given to somebody else.",
        file=_SYNC,
        find="            if is_interrupted:\n                self._core.cancel(transfer)",
        replace="            if not is_interrupted:\n                self._core.cancel(transfer)",
        killers=(
            f"{_BLOCKING}test_load_that_is_interrupted_leaves_nothing_that_writes",
        ),
    ),
    Mutant(
        name="forked_child_believes_it_is_served",
        why="Each call waits out its limit for threads that only the parent has.",
        file="ucm/cache/forked.py",
        find="        served.leave()\n",
        replace="        pass\n",
        killers=(f"{_FORKED}::test_forked_child_is_told_that_nothing_serves_it",),
    ),
    Mutant(
        name="close_where_a_signal_cuts_in",
        why="Ctrl-C leaves a loop that runs, and a slab's slots in use.",
        file=_SYNC,
        find="                closing = aside.submit(self._close)\n",
        replace="                closing = aside.submit(int)\n                self._close()\n",
        killers=(f"{_BLOCKING}test_close_that_is_interrupted_closes_all_the_same",),
    ),
    Mutant(
        name="two_threads_close_one_cache",
        why="The log is closed under the one that still drains.",
        file=_SYNC,
        find="        with self._closing:",
        replace="        if self._closing:",
        killers=(f"{_BLOCKING}test_close_of_two_threads_closes_in_order",),
    ),
    Mutant(
        name="lane_of_an_interrupted_save_is_free",
        why="The next prompt's bytes are stored under keys of the one before.",
        file="ucm/integration/transformers/dynamic.py",
        find="            lane.read_by = save\n",
        replace="",
        killers=(f"{_STAGING}test_lane_of_an_interrupted_save_waits_for_its_end",),
    ),
    Mutant(
        name="reset_that_fails_changes_nothing",
        why="Blocks of former weights are loaded into the new ones: wrong tokens.",
        file="ucm/integration/vllm/tier.py",
        find="        self._secret = secrets.token_bytes(16)\n"
        "        former, self._lookups = self._lookups, self._new_lookups()\n"
        "        former.close()\n"
        "        for job in list(self._jobs.values()):\n            job.wait()\n",
        replace="        for job in list(self._jobs.values()):\n            job.wait()\n"
        "        self._secret = secrets.token_bytes(16)\n"
        "        former, self._lookups = self._lookups, self._new_lookups()\n"
        "        former.close()\n",
        killers=(f"{_RESET}test_that_fails_parts_with_what_was_stored_as_well",),
    ),
    Mutant(
        name="each_prompt_waits_for_a_store_that_hangs",
        why="The engine's scheduler stands still for as many waits as requests come.",
        file="ucm/cache/staged.py",
        find="            self._rests_until = until + _REST * timeout",
        replace="            self._rests_until = until",
        killers=(f"{_STAGED}test_store_that_hangs_is_waited_for_once",),
    ),
    Mutant(
        name="store_that_hung_is_hardly_waited_for_ever",
        why="Behind one slow answer nothing that takes a moment is restored.",
        file="ucm/cache/staged.py",
        find="if now < self._rests_until else 1)",
        replace="if self._rests_until else 1)",
        killers=(f"{_STAGED}test_store_that_hangs_is_waited_for_once",),
    ),
    Mutant(
        name="who_goes_away_leaves_an_error",
        why="A log full of traces for what is every day's use.",
        file="examples/chat_server/chat.py",
        find="with out, contextlib.suppress(anyio.BrokenResourceError):",
        replace="with out:",
        killers=(f"{_CHAT}test_who_goes_away_amid_a_token_leaves_no_error",),
    ),
    Mutant(
        name="save_without_memory_ends_the_server",
        why="One prompt that does not fit ends all the others.",
        file="examples/chat_server/chat.py",
        find="except (UCMError, RuntimeError):",
        replace="except UCMError:",
        killers=(f"{_CHAT}TestLimits::test_save_that_is_refused_ends_no_other",),
    ),
    Mutant(
        name="text_for_a_key_is_taken",
        why="The loop finds out: nobody hears of that save, and its blocks stay in use.",
        file="ucm/cache/orders.py",
        find='        joined = b"".join(keys)\n',
        replace="        texts = (each for each in keys if isinstance(each, str))\n"
        '        joined = "".join(texts).encode() or b"".join(keys)\n',
        killers=(
            f"{_MISTAKES}test_keys_that_are_none_are_refused_before_anything_is_done",
        ),
    ),
    Mutant(
        name="close_can_be_cut",
        why="A task that is cancelled twice leaves a cache that nobody can close.",
        file="ucm/cache/host_loop.py",
        find="        while not called.done():",
        replace="        if not called.done():",
        killers=(
            "tests/cache/test_cancel.py::TestCut::test_task_cancelled_again_and_again_closes_all",
        ),
    ),
    Mutant(
        name="two_close_at_once",
        why="Who waits is told by nobody, once the second has let go of the loop.",
        file="ucm/cache/host_loop.py",
        find="            with self._is_taken:\n                return function()",
        replace="            return function()",
        killers=(
            "tests/cache/test_close.py::TestTold::test_two_who_close_at_once_tell_everybody",
        ),
    ),
    Mutant(
        name="call_without_a_thread_is_made_again",
        why="What a host saved is saved once more, by the next thread that starts.",
        file="ucm/cache/host_loop.py",
        find="            if is_taken.acquire(blocking=False):\n",
        replace="            if True:\n",
        killers=(
            "tests/cache/test_short.py::test_call_that_gets_no_thread_is_made_once",
        ),
    ),
)
