# SPDX-License-Identifier: Apache-2.0
"""Mutants of what a key says of weights, settings and adapters."""

from tests.mutations.mutant import Mutant

__all__ = ["KEYS"]

_KEYSPACE = "ucm/integration/vllm/keyspace.py"
_IDENTITY = "ucm/integration/vllm/identity.py"
_FIELDS = "ucm/integration/vllm/fields.py"
_WEIGHTS = "ucm/integration/weight_files.py"
_CHANGES = "ucm/integration/changes.py"
_ADAPTERS = "ucm/integration/vllm/adapters.py"
_SCHEDULER = "ucm/integration/vllm/scheduler.py"
_TESTS = "tests/integration/vllm"
_SPACES = f"{_TESTS}/test_keyspace.py::TestKeyspace"
_LENGTH = f"{_TESTS}/test_identity.py::TestLength"
_OTHERS = f"{_TESTS}/test_identity.py::TestOthers"
_TEXT = f"{_TESTS}/test_identity.py::TestText"
_REUSABLE = f"{_TESTS}/test_identity.py::TestReusable"
_EVERY = f"{_TESTS}/test_identity.py::TestFields"
_NAMES = "tests/integration/test_weight_files.py::TestName"
_FILES = "tests/integration/test_weight_files.py::TestWeightsDigest"
_MEANWHILE = "tests/integration/test_weight_files.py::TestWrittenMeanwhile"
_RANKS = f"{_TESTS}/test_topology.py::TestAgreement"
_LAYOUTS = f"{_TESTS}/test_layout.py::TestRefused"
_CONTENT = f"{_TESTS}/test_adapters.py::TestContent"
_KNOWN = f"{_TESTS}/test_adapters.py::TestKnown"
_WAITING = f"{_TESTS}/test_adapters.py::TestWaiting"
_HASHES = f"{_TESTS}/test_adapters.py::TestHashes"
_REUSE = f"{_TESTS}/test_adapter_requests.py::TestReuse"

KEYS = (
    # Settings.
    Mutant(
        name="settings_left_out",
        why="Engines that compute other values from the same tokens share blocks.",
        file=_KEYSPACE,
        find="        settings=settings_of(vllm_config),\n",
        replace="",
        killers=(f"{_SPACES}::test_each_setting_moves_its_field_and_the_digest",),
    ),
    Mutant(
        name="field_not_decided",
        why="A field of the engine that decides bytes is in no key, and nobody noticed.",
        file=_FIELDS,
        find='        "mm_processor_kwargs",\n',
        replace="",
        killers=(f"{_EVERY}::test_every_field_of_the_engine_is_decided_once",),
    ),
    Mutant(
        name="length_never_counts",
        why="Another set of rotary factors, chosen by the length, loads these blocks.",
        file=_IDENTITY,
        find="    if _is_length_free(model):\n",
        replace="    if model:\n",
        killers=(f"{_LENGTH}::test_length_counts_where_factors_may_depend_on_it",),
    ),
    Mutant(
        name="length_always_counts",
        why="Producer and consumer of different lengths never meet, for no reason.",
        file=_IDENTITY,
        find="    if _is_length_free(model):\n",
        replace="    if not model:\n",
        killers=(f"{_LENGTH}::test_length_that_decides_nothing_parts_no_engines",),
    ),
    Mutant(
        name="unknown_factors_trusted",
        why="A new kind of rotary embedding that looks at the length shares its blocks.",
        file=_IDENTITY,
        find='one.get("rope_type") in _LENGTH_FREE',
        replace='one.get("rope_type") != "longrope"',
        killers=(f"{_LENGTH}::test_length_counts_where_factors_may_depend_on_it",),
    ),
    Mutant(
        name="images_trusted_with_the_length",
        why="A processor that cuts images by the longest request shares its blocks.",
        file=_IDENTITY,
        find='        or getattr(model, "multimodal_config", None) is not None\n',
        replace="",
        killers=(f"{_LENGTH}::test_length_counts_where_models_look_at_it",),
    ),
    Mutant(
        name="numbered_images_taken",
        why="After a restart a request finds the blocks of another image of its number.",
        file=_IDENTITY,
        find="    if _numbers_media(model, vllm_config.cache_config):\n",
        replace="    if False:\n",
        killers=(
            f"{_REUSABLE}::test_images_are_refused_where_no_cache_has_the_engine_hash_them",
        ),
    ),
    Mutant(
        name="images_refused_beside_prefixes",
        why="An engine that hashes images for its own cache does not start.",
        file=_IDENTITY,
        find='        and not getattr(cache, "enable_prefix_caching", True)\n',
        replace="",
        killers=(
            f"{_REUSABLE}::test_images_are_refused_where_no_cache_has_the_engine_hash_them",
        ),
    ),
    Mutant(
        name="fitted_length_counts",
        why="An engine that fits its length into memory finds nothing after a restart.",
        file=_IDENTITY,
        find='return "auto" if fitted else ',
        replace="return ",
        killers=(
            f"{_LENGTH}::test_length_that_the_engine_finds_is_the_same_after_a_restart",
        ),
    ),
    Mutant(
        name="temperature_left_out",
        why="Llama 4 with and without a temperature of attention share blocks.",
        file=_IDENTITY,
        find='        "attention": _generation(model),\n',
        replace="",
        killers=(
            f"{_LENGTH}::test_generation_configuration_counts_where_attention_reads_it",
        ),
    ),
    Mutant(
        name="environment_left_out",
        why="Weights that a variable has quantised to four bits use blocks of eight.",
        file=_IDENTITY,
        find='        "environment": _environment(),\n',
        replace="",
        killers=(f"{_OTHERS}::test_what_variables_quantise_or_pack_counts",),
    ),
    Mutant(
        name="draft_left_out",
        why="Heads that draft in another way share the blocks of their layers.",
        file=_IDENTITY,
        find="    if speculative is None or speculative.method in _WITHOUT_DRAFT:\n",
        replace="    if speculative is not None:\n",
        killers=(f"{_OTHERS}::test_draft_with_layers_counts_and_one_without_does_not",),
    ),
    Mutant(
        name="functions_taken_by_name",
        why="Two functions of one name that override the model in two ways share.",
        file=_IDENTITY,
        find='if callable(value) and module.partition(".")[0] == "vllm":',
        replace="if callable(value):",
        killers=(f"{_TEXT}::test_value_that_may_hide_another_is_refused",),
    ),
    Mutant(
        name="scales_of_one_start_taken",
        why="Blocks are read with scales that another start of the engine had.",
        file=_IDENTITY,
        find='    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):\n',
        replace="    if not vllm_config:\n",
        killers=(f"{_REUSABLE}::test_blocks_that_nobody_may_use_are_refused",),
    ),
    Mutant(
        name="pooling_over_all_tokens_taken",
        why="The mean over a prompt leaves out the tokens that were loaded.",
        file=_IDENTITY,
        find='        model, "is_prefix_caching_supported", True\n',
        replace='        model, "is_anything_else", True\n',
        killers=(f"{_REUSABLE}::test_blocks_that_nobody_may_use_are_refused",),
    ),
    Mutant(
        name="scheduler_knows_the_type",
        why="An engine whose workers settle the type of their cache does not start.",
        file="ucm/ranks.py",
        find='("layout", "parallel", "kv_dtype", "settings")',
        replace='("layout", "parallel")',
        killers=(f"{_RANKS}::test_ranks_know_what_the_engine_settles_in_its_workers",),
    ),
    Mutant(
        name="no_cache_no_word",
        why="An encoder's start ends in an error of min() that names nothing.",
        file="ucm/integration/vllm/layout.py",
        find="    if not config.kv_cache_groups:\n",
        replace="    if not config:\n",
        killers=(f"{_LAYOUTS}::test_model_without_a_cache_is_refused_by_name",),
    ),
    # Weights.
    Mutant(
        name="dummy_weights_are_real",
        why="Random weights load the blocks of the real ones beside them.",
        file=_WEIGHTS,
        find='is_dummy = load.load_format == "dummy"',
        replace="is_dummy = False",
        killers=(f"{_NAMES}::test_dummy_weights_are_others_by_seed_and_configuration",),
    ),
    Mutant(
        name="object_storage_unseen",
        why="Weights that lie elsewhere are taken for those that lie here.",
        file=_WEIGHTS,
        find="    if model.model_weights:\n",
        replace="    if not load:\n",
        killers=(f"{_NAMES}::test_hidden_weights_need_a_name",),
    ),
    Mutant(
        name="any_loader_trusted",
        why="A loader that reads from a daemon shares with the files of the directory.",
        file=_WEIGHTS,
        find="    if load.load_format not in _LOCAL_FORMATS:\n",
        replace="    if not load.load_format:\n",
        killers=(f"{_NAMES}::test_hidden_weights_need_a_name",),
    ),
    Mutant(
        name="bare_directory_trusted",
        why="All revisions of a model of which only the JSON is here share blocks.",
        file=_WEIGHTS,
        find="    if not any(map(_is_weights, place.iterdir())):\n",
        replace="    if not place:\n",
        killers=(f"{_NAMES}::test_directory_without_weights_needs_a_name",),
    ),
    Mutant(
        name="one_file_of_configuration",
        why="Another processor of images, or another format's settings, share blocks.",
        file=_WEIGHTS,
        find="return path.suffix in _CONFIG_SUFFIXES and not path.name.startswith(_TEXT_ONLY)",
        replace='return path.name == "config.json"',
        killers=(f"{_FILES}::test_files_that_say_what_is_computed_count",),
    ),
    Mutant(
        name="download_dir_passed_by",
        why="A bare snapshot of another place stands for what the engine downloaded.",
        file=_WEIGHTS,
        find="    for cache_dir in (cache, None):\n",
        replace="    for cache_dir in (None,):\n",
        killers=(f"{_NAMES}::test_model_of_the_hub_is_found_where_the_engine_put_it",),
    ),
    Mutant(
        name="draft_weights_left_out",
        why="A head that was trained further loads blocks of what it was.",
        file=_KEYSPACE,
        find="    if draft is None or draft.model == model.model:\n",
        replace="    if draft is None or draft:\n",
        killers=(f"{_SPACES}::test_weights_of_a_draft_count",),
    ),
    # Adapters.
    Mutant(
        name="adapter_by_name",
        why="An adapter that was trained further at its path loads what it was.",
        file=_ADAPTERS,
        find="digest_size=len(plain), key=self._salt)",
        replace="digest_size=len(plain))",
        killers=(
            f"{_CONTENT}::test_other_content_at_one_path_has_other_hashes",
            f"{_REUSE}::test_adapter_hits_its_own_content_only",
        ),
    ),
    Mutant(
        name="adapter_settings_left_out",
        why="Engines that apply one adapter in two ways share blocks.",
        file=_ADAPTERS,
        find='f"{self._settings};{getattr(',
        replace='f"{getattr(',
        killers=(f"{_CONTENT}::test_how_the_engine_applies_it_counts",),
    ),
    Mutant(
        name="changed_adapter_known",
        why="A digest of new files stands for what the engine loaded before.",
        file=_ADAPTERS,
        find="            is_changed = changed_ns >= self._before_ns\n",
        replace="            is_changed = False\n",
        killers=(
            f"{_KNOWN}::test_adapter_that_was_written_after_the_start_is_passed_over",
            f"{_KNOWN}::test_adapter_that_changes_while_the_engine_runs_is_passed_over",
        ),
    ),
    Mutant(
        name="broken_promise_kept",
        why="A path that was written twice stands for both contents in turn.",
        file=_ADAPTERS,
        find="is_changed = known is not None and known[0] != signature",
        replace="is_changed = False",
        killers=(
            f"{_KNOWN}::test_promise_of_the_operator_is_taken_until_it_is_broken",
        ),
    ),
    Mutant(
        name="links_not_looked_at",
        why="A link that was set anew leads to an adapter that the engine never read.",
        file=_ADAPTERS,
        find="max(times + [at for path in files for at in links_made_ns(path)])",
        replace="max(times)",
        killers=(f"{_KNOWN}::test_path_that_leads_elsewhere_is_passed_over",),
    ),
    Mutant(
        name="one_look_for_good",
        why="A request that comes back keeps the hashes of an adapter that is gone.",
        file=_ADAPTERS,
        find="            or use.is_spent\n",
        replace="",
        killers=(f"{_WAITING}::test_request_that_begins_anew_is_looked_at_anew",),
    ),
    Mutant(
        name="look_up_put_off_for_ever",
        why="A file system that hangs holds up every request with an adapter.",
        file=_ADAPTERS,
        find="if not use.look.is_over and now < use.since + _LONGEST_WAIT_S:",
        replace="if not use.look.is_over:",
        killers=(f"{_WAITING}::test_look_up_is_put_off_for_a_short_time_only",),
    ),
    Mutant(
        name="looks_unbounded",
        why="Looks pile up behind a file system that hangs.",
        file=_ADAPTERS,
        find=" or len(self._open) >= _MAX_OPEN:",
        replace=":",
        killers=(f"{_WAITING}::test_looks_that_wait_are_bounded",),
    ),
    Mutant(
        name="session_keeps_old_hashes",
        why="Blocks of a session's new end are stored under the hashes of the old one.",
        file=_ADAPTERS,
        find="if made is None or made[0] != plain:",
        replace="if made is None:",
        killers=(f"{_HASHES}::test_hashes_follow_the_engines_own",),
    ),
    Mutant(
        name="adapter_thread_left",
        why="An engine that is gone leaves a thread that reads adapters.",
        file=_ADAPTERS,
        find="        self._aside.close(_CLOSE_TIMEOUT_S)\n",
        replace="",
        killers=(f"{_WAITING}::test_thread_of_its_own_reads_and_ends",),
    ),
    Mutant(
        name="adapter_saved_by_name",
        why="What an adapter computed is saved under hashes that its successor has.",
        file="ucm/integration/vllm/running.py",
        find="hashes=() if request is None else self._adapters.hashes_of(request),",
        replace="hashes=() if request is None else request.block_hashes,",
        killers=(
            f"{_REUSE}::test_adapter_hits_its_own_content_only",
            f"{_REUSE}::test_request_of_an_unknown_adapter_neither_loads_nor_saves",
        ),
    ),
    Mutant(
        name="adapter_found_by_name",
        why="A request finds what another content of its adapter computed.",
        file=_SCHEDULER,
        find="request_id, hashes = request.request_id, self._adapters.hashes_of(request)\n        most",
        replace="request_id, hashes = request.request_id, request.block_hashes\n        most",
        killers=(f"{_REUSE}::test_adapter_hits_its_own_content_only",),
    ),
    Mutant(
        name="adapter_loaded_by_name",
        why="A hit is promised under one hash and loaded under another.",
        file=_SCHEDULER,
        find="self.running.known(request), self._adapters.hashes_of(request)\n",
        replace="self.running.known(request), request.block_hashes\n",
        killers=(f"{_REUSE}::test_engine_that_only_saves_knows_the_adapter_as_well",),
    ),
    Mutant(
        name="adapter_not_forgotten",
        why="Every request that ever had an adapter is kept.",
        file=_SCHEDULER,
        find="            self._adapters.forget(request_id)\n",
        replace="            pass\n",
        killers=(f"{_REUSE}::test_adapter_hits_its_own_content_only",),
    ),
    # What is written while an engine starts.
    Mutant(
        name="files_written_meanwhile_named",
        why="Blocks of weights that were written over have the name of those that follow.",
        file=_WEIGHTS,
        find="is_given and is_changed_since(place, began_ns)",
        replace="False",
        killers=(f"{_MEANWHILE}::test_files_that_were_written_since_are_refused",),
    ),
    Mutant(
        name="download_taken_for_a_change",
        why="An engine that downloads its model does not start.",
        file=_WEIGHTS,
        find="is_given = place == Path(source)",
        replace="is_given = True",
        killers=(f"{_NAMES}::test_model_of_the_hub_is_found_where_the_engine_put_it",),
    ),
    Mutant(
        name="begin_of_the_engine_not_asked",
        why="As before: nobody says since when the engine runs.",
        file=_KEYSPACE,
        find='revision, engine_began_ns("EngineCore"))',
        replace="revision, None)",
        killers=(f"{_SPACES}::test_files_written_since_an_engine_began_are_refused",),
    ),
    Mutant(
        name="checkpoint_beside_the_weights_refused",
        why="A trainer that writes beside the weights keeps engines from starting.",
        file=_CHANGES,
        find="    if own.st_ctime_ns != own.st_mtime_ns:  # not by an entry\n",
        replace="    if own.st_ctime_ns:\n",
        killers=(
            "tests/integration/test_changes.py::TestLastChange::test_what_else_comes_does_not",
        ),
    ),
)
