# SPDX-License-Identifier: Apache-2.0
"""The table of modes: every combination of flags, and the page that shows it."""

import itertools
from types import SimpleNamespace

import attrs
import pytest
import structlog

from scripts.modes_table import all_facts
from scripts.pages import read
from tests.integration.vllm.kit import (
    cache_config,
    engine_config,
    full,
    plain_cache,
    state,
    window,
)
from ucm.config import Switch, UCMConfig
from ucm.errors import ConfigError
from ucm.integration.vllm.modes import (
    DIRECT,
    ROLES,
    RULES,
    Facts,
    Loads,
    Saves,
    Shape,
    choose_mode,
    contradicts,
    shape_of,
)
from ucm.integration.vllm.setup import Setup
from ucm.layout import GroupKind

EXPECTED = """
cp layerwise shape overlap cache : mode saves loads, with * for any

Above all of it, where a forward pass runs in parts: layer-wise becomes
layerwise-microbatches, whole blocks and asynchronous. Where there is a drafter, the lines
of one group of full attention without context ranks become layerwise-speculation,
layer-wise and asynchronous.

-  -  single    -  *  : direct                     whole     async
-  -  single    o  *  : direct                     whole     async
-  -  several   -  *  : direct                     whole     async
-  -  several   o  *  : direct                     whole     async
-  -  recurrent -  *  : direct                     whole     async
-  -  recurrent o  *  : direct                     whole     async
-  l  single    -  -  : layerwise                  layerwise layerwise
-  l  single    -  c  : layerwise-cached           layerwise async
-  l  single    o  *  : layerwise-overlapping      layerwise async
-  l  several   -  *  : layerwise-groups           layerwise async
-  l  several   o  *  : layerwise-groups           layerwise async
-  l  recurrent -  *  : layerwise-recurrent        layerwise async
-  l  recurrent o  *  : layerwise-recurrent        layerwise async
cp -  single    -  *  : context-parallel           whole     async
cp -  single    o  *  : context-parallel           whole     async
cp -  several   -  *  : context-parallel           whole     async
cp -  several   o  *  : context-parallel           whole     async
cp -  recurrent -  *  : context-parallel           whole     async
cp -  recurrent o  *  : context-parallel           whole     async
cp l  single    -  *  : context-parallel-layerwise layerwise async
cp l  single    o  *  : context-parallel-layerwise layerwise async
cp l  several   -  *  : context-parallel-layerwise layerwise async
cp l  several   o  *  : context-parallel-layerwise layerwise async
cp l  recurrent -  *  : context-parallel-layerwise layerwise async
cp l  recurrent o  *  : context-parallel-layerwise layerwise async
"""
"""Written by hand. A line that changes is a change for users: see the changelog."""


def expected() -> dict[Facts, tuple[str, Saves, Loads]]:
    """Return the table above with all roles, and with the mock beside it."""
    table = {}
    for line in EXPECTED.strip().splitlines()[7:]:
        given, outcome = (part.split() for part in line.split(":"))
        name, saves, loads = outcome
        facts = Facts(
            context_parallel=given[0] == "cp",
            use_layerwise=given[1] == "l",
            shape=Shape[given[2].upper()],
            overlapping_batches=given[3] == "o",
        )
        full_mode = (name, Saves[saves.upper()], Loads[loads.upper()])
        mock = ("mock", Saves.NOTHING, Loads.CLAIMED)
        caches = {"-": (False,), "c": (True,), "*": (False, True)}[given[4]]
        for local_cache, parts, drafts, is_mock in itertools.product(
            caches, *[(False, True)] * 3
        ):
            name, saves, loads = full_mode
            is_single = (facts.shape, given[0]) == (Shape.SINGLE, "-")
            if facts.use_layerwise and drafts and is_single:
                name, loads = "layerwise-speculation", Loads.ASYNC
            if facts.use_layerwise and parts:
                name, saves = "layerwise-microbatches", Saves.WHOLE
                loads = Loads.ASYNC
            if is_mock:
                name, saves, loads = mock
            one = attrs.evolve(
                facts,
                is_mock=is_mock,
                local_cache=local_cache,
                micro_batches=parts,
                speculation=drafts,
            )
            for back in (False, True):
                one = attrs.evolve(one, kv_role="kv_both", writes_back=back)
                table[one] = (name, saves, loads)
                one = attrs.evolve(one, kv_role="kv_producer")
                table[one] = (name, saves, Loads.NOTHING)
                one = attrs.evolve(one, kv_role="kv_consumer")
                table[one] = (name, saves if back else Saves.NOTHING, loads)
    return table


class TestTable:
    def test_every_combination_is_as_written_down(self):
        """S4-32: for each combination of flags and facts the mode is that of the table
        in this file, which changes only together with the changelog."""
        table = expected()
        assert 2 * 2 * 2 * 3 * 2 * 2 * 2 * 2 * 3 * 2 == len(table)
        assert set(table) == set(all_facts())
        found = {}
        for facts in all_facts():
            mode = choose_mode(facts)
            found[facts] = (mode.name, mode.saves, mode.loads)
        assert table == found

    def test_combinations_cover_every_fact(self):
        """A fact that is added later is enumerated, or this fails by its name."""
        for field in attrs.fields(Facts):
            values = {getattr(facts, field.name) for facts in all_facts()}
            kind = type(field.default)
            if field.name == "kv_role":
                assert set(ROLES) == values
            elif kind is bool:
                assert {False, True} == values, field.name
            else:
                assert set(kind) == values, field.name

    def test_every_rule_is_reached(self):
        """S4-32: no rule stands behind one that takes all that it would take."""
        reached = {choose_mode(facts).name for facts in all_facts()}
        assert [rule.mode.name for rule in RULES] == list(
            dict.fromkeys(rule.mode.name for rule in RULES)
        )
        assert {rule.mode.name for rule in RULES} == reached

    def test_rules_name_facts_that_exist(self):
        """A condition on something that is no fact would be found at start-up only."""
        names = {field.name for field in attrs.fields(Facts)}
        assert all(set(rule.when) <= names for rule in RULES)
        assert {} == RULES[-1].when
        assert DIRECT == choose_mode(Facts())

    def test_prompts_are_saved_by_those_whose_role_is_to_save(self):
        """A consumer that writes back saves in the way of the table, but no block
        within a prompt; nothing of this changes for other roles."""
        for facts in all_facts():
            is_consumer = facts.kv_role == "kv_consumer"
            assert is_consumer is not choose_mode(facts).saves_prompts

    def test_nothing_of_a_mock_is_saved(self):
        """Whatever else is set, a mock moves nothing and no other mode is a mock."""
        for facts in all_facts():
            mode = choose_mode(facts)
            assert facts.is_mock is mode.is_mock
            assert (mode.loads is Loads.CLAIMED) <= mode.is_mock
            if mode.is_mock:
                assert Saves.NOTHING is mode.saves

    def test_layerwise_is_as_asked_for_saves_and_as_possible_for_loads(self):
        """R-03, R-04: saves are layer-wise wherever that is asked for, unless a layer runs
        in parts; loads only where a failure can be told and harms nobody else: full
        attention alone, one batch at a time, no context ranks, no cache of the engine's,
        no layers behind the forward pass."""
        for facts in all_facts():
            mode = choose_mode(facts)
            if facts.is_mock:
                continue
            assert (mode.saves is Saves.LAYERWISE) == (
                facts.use_layerwise
                and not facts.micro_batches
                and (facts.kv_role != "kv_consumer" or facts.writes_back)
            )
            possible = (
                facts.use_layerwise
                and facts.shape is Shape.SINGLE
                and not facts.overlapping_batches
                and not facts.context_parallel
                and not facts.local_cache
                and not facts.micro_batches
                and not facts.speculation
                and facts.kv_role != "kv_producer"
            )
            assert possible == (mode.loads is Loads.LAYERWISE)

    def test_unknown_role_is_refused(self):
        """A role that is not in the table is no fact."""
        with pytest.raises(ValueError, match="kv_role"):
            Facts(kv_role="kv_neither")


def groups(*kinds):
    """Return as much of a layout as a shape needs."""
    return SimpleNamespace(groups=[SimpleNamespace(kind=kind) for kind in kinds])


class TestShape:
    @pytest.mark.parametrize(
        ("kinds", "shape"),
        [
            ((GroupKind.FULL,), Shape.SINGLE),
            ((GroupKind.WINDOW,), Shape.SEVERAL),
            ((GroupKind.FULL, GroupKind.WINDOW), Shape.SEVERAL),
            (("state",), Shape.RECURRENT),
            ((GroupKind.FULL, "state"), Shape.RECURRENT),
        ],
    )
    def test_shape_follows_the_groups(self, kinds, shape):
        """A kind of group that is not attention makes the layout recurrent."""
        assert shape is shape_of(groups(*kinds))

    @pytest.mark.parametrize(
        ("claim", "wrong_for"),
        [
            (Switch.AUTO, ()),
            (Switch.TRUE, (Shape.SINGLE, Shape.SEVERAL)),
            (Switch.FALSE, (Shape.RECURRENT,)),
        ],
    )
    def test_claim_is_compared_with_what_was_found(self, claim, wrong_for):
        """S4-33: what is detected decides; a claim can only be wrong about it."""
        assert wrong_for == tuple(s for s in Shape if contradicts(claim, s))


def setup(tmp_path, cache, change=lambda config: None, **extra):
    """Derive a setup from an engine's configuration, changed."""
    config = engine_config(str(tmp_path), weights_revision="r1", **extra)
    change(config)
    return Setup.of(config, cache)


class TestSetup:
    @pytest.mark.parametrize(
        ("extra", "batches", "role", "name"),
        [
            ({}, 1, "kv_both", "direct"),
            ({"use_layerwise": True}, 1, "kv_both", "layerwise"),
            ({"use_layerwise": True}, 2, "kv_both", "layerwise-overlapping"),
            ({"use_layerwise": True, "hit_ratio": 0.0}, 1, "kv_both", "mock"),
            ({"hit_ratio": 1}, 1, "kv_consumer", "mock"),
            ({}, 1, "kv_producer", "direct"),
        ],
    )
    def test_mode_follows_settings_and_engine(
        self, tmp_path, extra, batches, role, name
    ):
        """S4-33: the keys, the engine's batches and its role reach the table."""

        def change(config):
            config.max_concurrent_batches = batches
            config.kv_transfer_config.kv_role = role

        made = setup(tmp_path, plain_cache(), change, **extra)
        assert name == made.mode.name
        assert (role == "kv_producer") is (made.mode.loads is Loads.NOTHING)

    @pytest.mark.parametrize("role", ["kv_both", "kv_consumer", "kv_producer"])
    def test_engine_that_tells_experts_only_saves(self, tmp_path, role):
        """Those of tokens that are loaded are not known; a role that loads is refused by name."""

        def change(config):
            config.model_config.enable_return_routed_experts = True
            config.kv_transfer_config.kv_role = role

        if role == "kv_producer":
            assert setup(tmp_path, plain_cache(), change)
            return
        with pytest.raises(ConfigError, match="enable_return_routed_experts"):
            setup(tmp_path, plain_cache(), change)

    def test_engine_that_caches_blocks_itself_does_not_load_layerwise(self, tmp_path):
        """The engine keeps blocks in its cache whose load has failed: whoever finds them
        before they are computed would say something wrong."""

        def change(config):
            config.cache_config.enable_prefix_caching = True

        made = setup(tmp_path, plain_cache(), change, use_layerwise=True)
        assert ("layerwise-cached", Loads.ASYNC) == (made.mode.name, made.mode.loads)

    def test_engine_that_does_not_say_is_taken_to_overlap(self, tmp_path):
        """An engine without the word for it gets the loads that are always safe."""

        def change(config):
            del config.max_concurrent_batches

        made = setup(tmp_path, plain_cache(), change, use_layerwise=True)
        assert "layerwise-overlapping" == made.mode.name

    @pytest.mark.parametrize(
        ("micro_batches", "speculation", "name"),
        [
            (False, None, "layerwise"),
            (False, SimpleNamespace(method="ngram"), "layerwise-speculation"),
            (True, None, "layerwise-microbatches"),
            (None, None, "layerwise-microbatches"),
            (False, "silent", "layerwise-speculation"),
        ],
    )
    def test_engine_that_runs_layers_otherwise_falls_back_by_name(
        self, tmp_path, micro_batches, speculation, name
    ):
        """R-03, R-04: an engine whose layers run in parts, or behind the forward pass, or
        that does not say so, gets what is safe."""

        def change(config):
            if micro_batches is None:
                del config.parallel_config.use_ubatching
            else:
                config.parallel_config.use_ubatching = micro_batches
            if speculation == "silent":
                del config.speculative_config
            else:
                config.speculative_config = speculation

        made = setup(tmp_path, plain_cache(), change, use_layerwise=True)
        assert name == made.mode.name

    @pytest.mark.parametrize(
        ("second", "groups", "expected"),
        [
            (False, (["a"], full()), (False, False)),
            (True, (["a"], full()), (True, False)),
            (True, (["a"], state()), (True, True)),
            (False, (["a"], state()), (False, False)),
            (None, (["a"], state()), (True, True)),
        ],
    )
    def test_order_of_the_engines_runner_is_found(
        self, tmp_path, second, groups, expected
    ):
        """R-01: what runs on the second runner, or does not say on which, overwrites before
        it says so; copies are confirmed only where blocks are ever cleared."""

        def change(config):
            if second is not None:
                config.use_v2_model_runner = second

        made = setup(tmp_path, cache_config(groups), change)
        assert expected == (made.overwrites_first, made.confirms)

    def test_groups_come_from_the_engine(self, tmp_path):
        """S4-33: what the KV cache configuration says decides, nothing has to be set."""
        cache = cache_config((["a"], full()), (["b"], window()))
        made = setup(tmp_path, cache, use_layerwise=True)
        assert "layerwise-groups" == made.mode.name

    @pytest.mark.parametrize(
        ("claim", "role", "warned"),
        [
            (claim, role, claim in (True, "true") and role == "scheduler")
            for claim, role in itertools.product(
                ("auto", True, "true", False, "false"), ("scheduler", "worker-0")
            )
        ],
    )
    def test_wrong_claim_is_warned_of_by_name(self, tmp_path, claim, role, warned):
        """S4-33: a claim that contradicts what was found is a warning with the key's
        name, once, and changes nothing."""
        made = setup(tmp_path, plain_cache(), use_hybrid_linear_attention=claim)
        assert "direct" == made.mode.name
        structlog.configure()
        try:
            with structlog.testing.capture_logs() as events:
                made.open_log(role)
        finally:
            structlog.reset_defaults()
        assert (["use_hybrid_linear_attention"] if warned else []) == [
            event["key"] for event in events
        ]


class TestPage:
    def test_page_names_every_key_of_the_modes(self):
        """S4-33: the page explains each key that the mode depends on."""
        text = read("modes.md")
        for key in ("use_layerwise", "use_hybrid_linear_attention", "hit_ratio"):
            assert key in attrs.fields_dict(UCMConfig)
            assert f"`{key}" in text
