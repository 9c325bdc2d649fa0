# SPDX-License-Identifier: Apache-2.0
"""Mutants of how releases of vLLM are told apart and tried, and of the plugin."""

from tests.mutations.mutant import Mutant

__all__ = ["RELEASES"]

_RELEASE = "ucm/integration/vllm/release.py"
_TRIAL = "ucm/integration/vllm/trial.py"
_PLUGIN = "ucm/integration/vllm/plugin.py"
_SCHEDULER = "ucm/integration/vllm/scheduler.py"
_UNTRIED = "tests/integration/vllm/test_release.py::TestUntried"
_KNOWN = "tests/integration/vllm/test_release.py::TestKnown"
_SYNTHETIC = "tests/integration/vllm/test_trial.py::TestSynthetic"
_REGISTER = "tests/integration/vllm/test_plugin.py::TestRegister"
_HALVES = "tests/integration/vllm/test_halves.py::TestTogether"

RELEASES = (
    Mutant(
        name="release_taken_unseen",
        why="An engine whose hooks nobody knows runs, and breaks in its own way.",
        file=_RELEASE,
        find="    if found.refused:\n",
        replace="    if found.refused and not needs:\n",
        killers=(f"{_UNTRIED}::test_difference_is_refused_by_name_and_remedy",),
    ),
    Mutant(
        name="newer_release_refused_unseen",
        why="Whoever installs the engine's next release cannot start.",
        file=_RELEASE,
        find="    if version() < first:\n",
        replace="    if version() < first or version() > last:\n",
        killers=(
            f"{_UNTRIED}::test_release_without_a_difference_is_taken_with_a_warning",
        ),
    ),
    Mutant(
        name="older_release_tried",
        why="An engine from before the first one that is known runs.",
        file=_RELEASE,
        find="    if version() < first:\n",
        replace="    if version() < (0, 0):\n",
        killers=(f"{_KNOWN}::test_older_release_is_refused_with_those_known",),
    ),
    Mutant(
        name="untried_release_not_told",
        why="Nobody hears that the engine is one that nobody has tried.",
        file="ucm/integration/vllm/setup.py",
        find="        if self.untried:\n",
        replace="        if self.untried and not self.untried:\n",
        killers=(f"{_UNTRIED}::test_the_scheduler_warns_of_it_once",),
    ),
    Mutant(
        name="gone_name_overlooked",
        why="A field that is gone breaks the first step instead of the start.",
        file=_TRIAL,
        find="        if not found and tells_gone:\n",
        replace="        if not found and not tells_gone:\n",
        killers=(f"{_SYNTHETIC}::test_name_that_is_gone_is_refused",),
    ),
    Mutant(
        name="changed_hook_overlooked",
        why="A hook is called with other arguments than ours takes.",
        file=_TRIAL,
        find="        *_changed(needs, needs.hooks, offered, keeps=_is_same),\n",
        replace="        *_changed(needs, needs.hooks, offered, keeps=lambda *_: True),\n",
        killers=(f"{_SYNTHETIC}::test_hook_that_takes_something_else_is_refused",),
    ),
    Mutant(
        name="calls_not_bound",
        why="A call with an argument that ours does not take ends a step.",
        file=_TRIAL,
        find="            if not any(_binds(one, call) for one in takes):\n",
        replace="            if not any(_binds(one, call) or True for one in takes):\n",
        killers=(f"{_SYNTHETIC}::test_call_that_the_hook_does_not_take_is_refused",),
    ),
    Mutant(
        name="abstract_hook_overlooked",
        why="The engine cannot make our class, and says so in its own words.",
        file=_TRIAL,
        find="for name in sorted(abstract) if name not in own),",
        replace="for name in sorted(abstract) if not own),",
        killers=(f"{_SYNTHETIC}::test_abstract_hook_that_we_lack_is_refused",),
    ),
    Mutant(
        name="required_argument_overlooked",
        why="What we call wants an argument that we do not give.",
        file=_TRIAL,
        find="        each.default is not Parameter.empty\n",
        replace="        each.kind is Parameter.KEYWORD_ONLY\n",
        killers=(f"{_SYNTHETIC}::test_function_that_we_call_may_take_more",),
    ),
    Mutant(
        name="name_taken_from_vllm_ascend",
        why="vllm-ascend's plugin finds its name taken, and no engine starts there.",
        file=_PLUGIN,
        find="    if _is_installed(_OWNER):\n        return\n",
        replace="",
        killers=(f"{_REGISTER}::test_name_is_left_to_an_installed_vllm_ascend",),
    ),
    Mutant(
        name="taken_name_raises",
        why="A plugin that raises ends every engine of the machine.",
        file=_PLUGIN,
        find="    with suppress(ValueError):",
        replace="    with suppress(KeyError):",
        killers=(f"{_REGISTER}::test_name_that_is_taken_stays",),
    ),
    Mutant(
        name="late_load_from_the_start",
        why="A load that is ordered late fills the blocks of other tokens.",
        file=_SCHEDULER,
        find="computed = known.computed_tokens",
        replace="computed = 0",
        killers=(f"{_HALVES}::test_load_may_be_ordered_steps_after_it_was_matched",),
    ),
    Mutant(
        name="match_without_a_load_stays",
        why="Each request that ends before its load is ordered leaves a number behind.",
        file="ucm/integration/vllm/running.py",
        find="known = self._known.pop(request_id, None)",
        replace="known = self._known.get(request_id)",
        killers=(f"{_HALVES}::test_load_may_be_ordered_steps_after_it_was_matched",),
    ),
)
