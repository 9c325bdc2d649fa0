# SPDX-License-Identifier: Apache-2.0
"""Mutants of where settings come from, and of what the doctor finds."""

from tests.mutations.mutant import Mutant

__all__ = ["DOCTOR"]

_FILES = "ucm/configuration/files.py"
_SOURCES = "ucm/configuration/sources.py"
_FOREIGN = "ucm/configuration/foreign.py"
_TEST_FILES = "tests/configuration/test_files.py"
_TEST_SOURCES = "tests/configuration/test_sources.py"
_TEST_FOREIGN = "tests/configuration/test_foreign.py"
_AGREED = "tests/integration/vllm/test_topology.py::TestAgreement"
_HOSTILE = f"{_TEST_FILES}::test_yaml_that_is_damaged_or_hostile_is_refused"
_NEARER = f"{_TEST_SOURCES}::TestPrecedence::test_nearer_places_count_and_are_named"

DOCTOR = (
    Mutant(
        name="yaml_aliases_taken",
        why="A file of a few lines becomes gigabytes when it is told in an error.",
        file=_FILES,
        find='        if getattr(event, "anchor", None):\n',
        replace='        if getattr(event, "anchor", None) and False:\n',
        killers=(_HOSTILE,),
    ),
    Mutant(
        name="yaml_key_twice_hides_the_first",
        why="An operator changes the first of two lines and nothing happens.",
        file=_FILES,
        find="    if key in known:\n",
        replace="    if key in known and not key:\n",
        killers=(_HOSTILE,),
    ),
    Mutant(
        name="settings_file_opened_blocking",
        why="An engine whose file is a pipe never starts and never says why.",
        file=_FILES,
        find="            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):\n",
        replace="            if stat.S_ISSOCK(os.fstat(file.fileno()).st_mode):\n",
        killers=(f"{_TEST_FILES}::test_what_is_no_plain_file_is_refused_at_once",),
    ),
    Mutant(
        name="settings_file_without_bound",
        why="A start-up reads a log of gigabytes into memory.",
        file=_FILES,
        find="            data = file.read(MOST_BYTES + 1)\n",
        replace="            data = file.read()[:MOST_BYTES]\n",
        killers=(f"{_TEST_FILES}::test_a_file_without_end_is_refused_by_its_size",),
    ),
    Mutant(
        name="file_counts_before_variables",
        why="What an operator sets for one container is silently not what it does.",
        file=_SOURCES,
        find="        *([_Source(file, read_settings(Path(file)))] if file else []),\n"
        "        *_from_environment(variables),\n",
        replace="        *_from_environment(variables),\n"
        "        *([_Source(file, read_settings(Path(file)))] if file else []),\n",
        killers=(_NEARER,),
    ),
    Mutant(
        name="overridden_settings_unchecked",
        why="A mistake in a file shows on the day on which a variable goes.",
        file=_SOURCES,
        find="            UCMConfig.from_mapping(found)\n        except",
        replace="        except",
        killers=(
            f"{_TEST_SOURCES}::TestErrors::test_a_setting_that_is_overridden_is_still_checked",
        ),
    ),
    Mutant(
        name="orchestrators_variables_are_settings",
        why="A Kubernetes service called ucm stops every engine of its namespace.",
        file=_SOURCES,
        find="        if name == FILE_VARIABLE or _ORCHESTRATOR.fullmatch(name):\n",
        replace="        if name == FILE_VARIABLE:\n",
        killers=(
            f"{_TEST_SOURCES}::TestVariables::test_what_kubernetes_sets_for_a_service_is_no_setting",
        ),
    ),
    Mutant(
        name="ranks_settings_uncompared",
        why="Two halves of an engine save and load in different modes.",
        file="ucm/ranks.py",
        find="    for name in sorted(facts.settings.keys() | own.settings.keys()):\n",
        replace="    for name in sorted(facts.settings.keys() - own.settings.keys()):\n",
        killers=(f"{_AGREED}::test_rank_that_was_configured_otherwise_is_refused",),
    ),
    Mutant(
        name="foreign_keys_left_out_silently",
        why="Who comes from the peer believes that the disk is still used.",
        file=_FOREIGN,
        find="            left.append(LeftOut(path, why))\n",
        replace="            pass\n",
        killers=(
            f"{_TEST_FOREIGN}::TestTranslation::test_the_peers_own_example_starts_and_says_its_equivalent",
        ),
    ),
    Mutant(
        name="foreign_key_counts_before_ours",
        why="A setting of ours does nothing beside the one that it was to replace.",
        file=_FOREIGN,
        find="            value = {**below, **value}\n",
        replace="            value = {**value, **below}\n",
        killers=(
            f"{_TEST_FOREIGN}::TestTranslation::test_our_own_key_counts_beside_a_foreign_one",
        ),
    ),
)
