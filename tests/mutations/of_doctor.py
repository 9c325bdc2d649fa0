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

_LOOK = "ucm/stores/slab/_look.py"
_PLACE = "ucm/doctor/place.py"
_ENGINE = "ucm/doctor/engine.py"
_SIZING = "ucm/doctor/sizing.py"
_TEST_LOOK = "tests/stores/test_slab_look.py"
_REFUSALS = "tests/stores/test_slab_refusals.py::TestRefusals"
_TEST_ENGINE = "tests/doctor/test_engine.py"
_TEST_PLACE = "tests/doctor/test_place.py"
_TEST_SIZES = "tests/doctor/test_sizing.py::TestSizes"
_PAGED = "tests/test_prefixes.py::TestPagedLayout"
_CHECK = "tests/cli/test_config.py::TestCheck"
_MOVES = "tests/cli/test_store_move.py::TestThereAndBack"

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
        name="deep_settings_file_is_read_to_its_end",
        why="A page of brackets holds a start for as long as its length squared.",
        file=_FILES,
        find="            if len(keys) > _MOST_DEPTH:  #",
        replace="            if not keys:  #",
        killers=(_HOSTILE,),
    ),
    Mutant(
        name="settings_file_opened_blocking",
        why="An engine whose file is a pipe never starts and never says why.",
        file=_FILES,
        find="        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)\n",
        replace="        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)\n",
        killers=(f"{_TEST_FILES}::test_what_is_no_plain_file_is_refused_at_once",),
    ),
    Mutant(
        name="settings_file_without_bound",
        why="A start-up reads a log of gigabytes into memory.",
        file=_FILES,
        find='            data = file.read(most_bytes + 1) if is_plain else b""\n',
        replace='            data = file.read(most_bytes) if is_plain else b""\n',
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
    Mutant(
        name="foreign_directory_looks_free",
        why="The doctor says that all is well, and the engine refuses to start.",
        file=_LOOK,
        find="            require_ours(directory, _SOME)\n",
        replace="",
        killers=(
            f"{_TEST_LOOK}::TestProblems::test_directory_of_somebody_else_is_named_and_untouched",
        ),
    ),
    Mutant(
        name="limits_of_memory_unseen",
        why="A container is killed without a word once its slab fills.",
        file=_LOOK,
        find="(room, *memory_rooms(system))",
        replace="(room,)",
        killers=(f"{_TEST_LOOK}::test_limits_of_memory_count",),
    ),
    Mutant(
        name="short_room_is_well",
        why="The commonest fault of a container is not found: a small /dev/shm.",
        file=_PLACE,
        find="    short = [room for room in seen.rooms if room.left < seen.needed_bytes]\n",
        replace="    short = [room for room in seen.rooms if room.left < 0]\n",
        killers=(f"{_TEST_PLACE}::TestRoom::test_small_shared_memory_is_found",),
    ),
    Mutant(
        name="hung_mount_hangs_the_doctor",
        why="Who asks what is wrong with a mount gets no answer.",
        file=_PLACE,
        find="    thread.join(seconds)\n",
        replace="    thread.join()\n",
        killers=(f"{_TEST_PLACE}::test_what_hangs_is_not_waited_for",),
    ),
    Mutant(
        name="default_policy_is_well",
        why="An engine with vLLM's default fails requests, and nobody was warned.",
        file=_ENGINE,
        find='    policy = transfer.get(_POLICY, "fail")\n',
        replace='    policy = transfer.get(_POLICY, "recompute")\n',
        killers=(
            f"{_TEST_ENGINE}::test_policy_that_ends_requests_is_found_also_as_the_default",
        ),
    ),
    Mutant(
        name="replicas_counted_as_parts",
        why="A capacity is said to hold half of what it does.",
        file=_SIZING,
        find="    shards = 1 if model.is_latent else min(model.heads, tensor)\n",
        replace="    shards = 1 if model.is_latent else tensor\n",
        killers=(f"{_TEST_SIZES}::test_ranks_share_a_block_and_store_each_part_once",),
    ),
    Mutant(
        name="loaded_bytes_not_compared",
        why="A store that gives back other bytes is called well.",
        file="ucm/doctor/trial.py",
        find='    return "" if same else "what was loaded is not what was saved"\n',
        replace='    return "" if same or pool else "what was loaded is not what was saved"\n',
        killers=(
            "tests/doctor/test_trial.py::test_bytes_that_come_back_otherwise_are_found",
        ),
    ),
    Mutant(
        name="keys_of_two_settings_look_equal",
        why="Two engines find nothing of each other, and the reason is not named.",
        file="ucm/doctor/keys.py",
        find="        if mine != theirs:\n",
        replace='        if mine != theirs and not name.startswith("rope"):\n',
        killers=(
            "tests/doctor/test_keys.py::TestDifferences::test_settings_and_ranks_are_compared_one_by_one",
        ),
    ),
    Mutant(
        name="damaged_descriptions_passed_over",
        why="A key space is said to be unknown that a damaged file describes.",
        file="ucm/cli/keys.py",
        find="        if problem:\n",
        replace="        if problem and found:\n",
        killers=(
            "tests/cli/test_keys.py::TestDiff::test_store_that_is_none_is_one_line_and_untouched",
        ),
    ),
    Mutant(
        name="backend_that_is_down_is_well",
        why="A tier that nobody can reach is called well, and costs every request a miss.",
        file="ucm/doctor/tiers.py",
        find="    if presence is Presence.UNKNOWN:\n",
        replace="    if presence is None:\n",
        killers=("tests/doctor/test_tiers.py::test_backend_that_is_down_is_found",),
    ),
    Mutant(
        name="credentials_told",
        why="A password stands in the log of every start that failed.",
        file="ucm/errors.py",
        find='        return _PARAMETER.sub(_parameter, _CREDENTIALS.sub("://***@", value))\n',
        replace="        return _PARAMETER.sub(_parameter, value)\n",
        killers=("tests/test_errors.py::test_a_setting_that_is_secret_is_not_told",),
    ),
    Mutant(
        name="peers_directory_forgotten",
        why="Who comes from the peer finds that nothing is kept on the mount any more.",
        file=_FOREIGN,
        find='    return Equivalent(key, "tiers", [tier])\n',
        replace='    return Equivalent(key, "tiers", [])\n',
        killers=(
            f"{_TEST_FOREIGN}::TestTranslation::test_directory_of_the_peer_becomes_a_tier_of_files",
        ),
    ),
    Mutant(
        name="export_of_yesterday_counts_as_of_now",
        why="What was used yesterday displaces what a serving slab has in use.",
        file="ucm/stores/moving.py",
        find="    return max(wall_ns - ahead, moment - _OLDEST_NS)\n",
        replace="    return moment\n",
        killers=(f"{_MOVES}::test_what_lay_in_a_file_is_older_by_that",),
    ),
    Mutant(
        name="clocks_of_two_imports_differ",
        why="A file that is imported again displaces what it brought before.",
        file="ucm/stores/moving.py",
        find="    ahead = -((moment - now_ns) // _SECOND_NS) * _SECOND_NS\n",
        replace="    ahead = (wall_ns or now_ns) - moment\n",
        killers=(f"{_MOVES}::test_second_import_displaces_nothing_of_the_first",),
    ),
    Mutant(
        name="tiers_unread_by_the_check",
        why="A misspelt key of a tier is called well, and the agent ends at its start.",
        file="ucm/doctor/start.py",
        find="    check_apart(config)\n",
        replace="",
        killers=(f"{_CHECK}::test_what_an_engine_or_its_agent_refuses_is_refused",),
    ),
    Mutant(
        name="engines_keys_unread_by_the_check",
        why="A store beside the engine's settings counts for nobody, and is called well.",
        file="ucm/configuration/engine.py",
        find="    _check_keys(found)\n",
        replace="",
        killers=(f"{_CHECK}::test_what_an_engine_refuses_of_its_own_is_refused",),
    ),
    Mutant(
        name="size_without_end",
        why="X-09: a capacity of hundreds of digits ends in an error that names no key.",
        file="ucm/settings.py",
        find="    if nbytes == math.inf:\n",
        replace="    if nbytes < 0:\n",
        killers=(
            "tests/test_config_bounds.py::test_size_with_more_digits_than_any_number_is_refused",
        ),
    ),
    Mutant(
        name="slab_of_others_to_be_removed",
        why="Who names another user's slab is told to stop its users and remove it.",
        file="ucm/stores/slab/_files.py",
        find="            raise path_error(self.root, problem, remedy)\n",
        replace="            raise path_error(self.root, problem)\n",
        killers=(f"{_REFUSALS}::test_unsafe_or_damaged_files_are_refused",),
    ),
    Mutant(
        name="place_of_others_to_be_removed",
        why="Who may not write to a directory is told to remove it, and not who has to.",
        file="ucm/stores/slab/_locks.py",
        find='            raise forbidden(root, f"it cannot',
        replace='            raise path_error(root, f"it cannot',
        killers=(
            f"{_REFUSALS}::test_place_of_somebody_else_is_told_with_who_must_write_there",
        ),
    ),
    Mutant(
        name="look_tells_to_remove",
        why="As for the engine itself: the check says what would not help.",
        file=_LOOK,
        find="        raise forbidden(root, ",
        replace="        raise path_error(root, ",
        killers=(
            f"{_TEST_LOOK}::TestProblems::test_place_that_cannot_be_written_to_is_named",
        ),
    ),
    Mutant(
        name="exporter_of_a_cache",
        why="Who gives the cache and not its measure is told of an attribute of Python's.",
        file="ucm/exporter.py",
        find='        _check_measure("measure", measure, Mapping)\n',
        replace="",
        killers=(
            "tests/test_exporter.py::TestExporter::test_what_measures_nothing_is_refused",
        ),
    ),
    Mutant(
        name="layer_without_a_name",
        why="An author who gives arrays for their bytes is told of an index of numpy's.",
        file="ucm/prefixes.py",
        find="    except (TypeError, ValueError) as exc:\n        is_short",
        replace="    except ZeroDivisionError as exc:\n        is_short",
        killers=(f"{_PAGED}::test_what_is_no_number_of_bytes_is_named",),
    ),
    Mutant(
        name="text_of_nobody",
        why="R-41: whose salt is an empty text has the share of nobody without a word.",
        file="ucm/prefixes.py",
        find='    _check_bytes("salt", salt)\n    if not salt:\n',
        replace="    if not salt:\n",
        killers=("tests/test_prefixes.py::test_tenant_of_a_text_is_refused",),
    ),
    Mutant(
        name="one_underscore_too_few",
        why="X-09: UCM_STORE_CAPACITY is refused with a list in which there is no capacity.",
        file="ucm/settings.py",
        find='plain in (each, f"{section}_{each}")',
        replace="plain in ()",
        killers=(
            "tests/test_config_bounds.py::test_name_without_its_section_is_led_there",
        ),
    ),
    Mutant(
        name="path_of_nothing",
        why="X-09: a variable that is set to nothing has the slab where the engine was started.",
        file="ucm/settings.py",
        find='    if not value or str(value)[0] == "~":\n',
        replace="    if False:\n",
        killers=(
            "tests/test_config_bounds.py::test_path_that_nobody_means_is_refused",
        ),
    ),
    Mutant(
        name="too_many_slots_want_more",
        why="X-12: a capacity that is too large is answered with the least that will do.",
        file="ucm/stores/slab/_extents.py",
        find="                if self.num_slots < 1\n",
        replace="                if True\n",
        killers=(f"{_REFUSALS}::test_impossible_size_is_refused",),
    ),
    Mutant(
        name="policy_unread_by_the_check",
        why="A policy that no engine knows is called well, and the engine does not start.",
        file="ucm/doctor/start.py",
        find="        check_policy(transfer)\n",
        replace="",
        killers=(f"{_CHECK}::test_what_an_engine_refuses_of_its_own_is_refused",),
    ),
    Mutant(
        name="file_in_place_of_a_device",
        why="An export that root forces to /dev/null takes it from all programs.",
        file="ucm/cli/store/move.py",
        find="    if file.exists() and not file.is_file():",
        replace="    if False:",
        killers=(
            "tests/cli/test_store_hostile.py::TestTarget::test_export_takes_the_place_of_no_device",
        ),
    ),
    Mutant(
        name="cut_off_and_called_well",
        why="A slab whose file was cut off is called well, and the engine does not start.",
        file=_LOOK,
        find="        if info.st_size < manifest.data_bytes:\n",
        replace="        if False:\n",
        killers=(f"{_TEST_LOOK}::TestProblems::test_slab_that_was_cut_off_is_named",),
    ),
    Mutant(
        name="client_unlooked_for",
        why="A tier without its package is called well, and the agent ends at its start.",
        file="ucm/doctor/tiers.py",
        find='    _check_client(str(settings["type"]), key)\n',
        replace="",
        killers=(f"{_CHECK}::test_package_that_is_missing_is_named",),
    ),
)
