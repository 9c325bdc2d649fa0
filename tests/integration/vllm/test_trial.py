# SPDX-License-Identifier: Apache-2.0
"""What is found different in an engine that nobody has tried."""

from itertools import pairwise

import pytest

from tests.golden.make_engine_needs import TARGET, dumps, needs_of
from tests.integration.vllm.engine_api import VERSIONS, api_of
from ucm.integration.vllm.trial import Needs, Offer, differences, load_needs
from ucm.integration.vllm.ucm_connector import INHERITED_ON_PURPOSE, UCMConnector

NEEDS = Needs(
    release="1.0",
    hooks={
        "KVConnectorBase_V1.save": ["(name, kv, *, wait=True, **kwargs)"],
        "KVConnectorBase_V1.is_fast": ["-> bool"],
        "KVConnectorStats.reduce": ["()"],
    },
    members={
        "Output.ids": ["set[str] | None"],
        "Blocks.get": ["(allow_none=False)"],
        "SEED": ["constant"],
    },
    settings={"CacheConfig.size": ["int"]},
    known=["KVConnectorBase_V1.save", "KVConnectorBase_V1.is_fast"],
)
OFFERED = {
    "KVConnectorBase_V1": {"ABC"},
    "KVConnectorBase_V1.save": {"(name, kv, *, wait=True, **kwargs)"},
    "KVConnectorBase_V1.is_fast": {"-> bool"},
    "KVConnectorBase_V1._secret": {"()"},
    "KVConnectorStats.reduce": {"()"},
    "Output": {"Base"},
    "Output.ids": {"set[str] | None"},
    "Blocks": {""},
    "Blocks.get": {"(allow_none=False)"},
    "SEED": {"constant"},
    "CacheConfig.size": {"int"},
    "call save": {"(_, _)", "(_, kv=_, wait=_)", "(*_, **_)"},
    "call other": {"(_, _, _, _)"},
}


def found(drop=(), abstract=(), **changed):
    """Return what differs when names are dropped or said otherwise."""
    names = {name: texts for name, texts in OFFERED.items() if name not in drop}
    return differences(NEEDS, Offer(names | changed, abstract))


def changed(name, *texts):
    """Return what differs when one name is said otherwise."""
    return found(**{name: set(texts)})


class TestSynthetic:
    def test_engine_that_is_the_same_has_no_difference(self):
        """Nothing is found where nothing is."""
        assert ([], []) == (found().refused, found().noted)

    @pytest.mark.parametrize(
        "name", [*NEEDS.hooks, *NEEDS.members, *NEEDS.settings], ids=str
    )
    def test_name_that_is_gone_is_refused(self, name):
        """Hooks, fields, functions and settings are all missed."""
        assert [f"{name} is gone"] == found(drop=[name]).refused

    @pytest.mark.parametrize(
        "takes",
        [
            "(name, kv, attn, *, wait=True, **kwargs)",
            "(kv, name, *, wait=True, **kwargs)",
            "(name, kv, *, wait, **kwargs)",
            "(name, kv, *, wait=True)",
        ],
    )
    def test_hook_that_takes_something_else_is_refused(self, takes):
        """A hook whose parameters are not those known is named with both."""
        (said,) = changed("KVConnectorBase_V1.save", takes).refused
        assert said == (
            f"KVConnectorBase_V1.save is {takes}, in 1.0 "
            "(name, kv, *, wait=True, **kwargs)"
        )

    def test_hook_that_becomes_a_method_is_refused(self):
        """A property that is called, or a method that is read, breaks a step."""
        (said,) = changed("KVConnectorBase_V1.is_fast", "()").refused
        assert said.startswith("KVConnectorBase_V1.is_fast is ()")

    @pytest.mark.parametrize("call", ["(_)", "(_, _, _)", "(_, _, name=_)"])
    def test_call_that_the_hook_does_not_take_is_refused(self, call):
        """The engine's own calls are bound to what our hook takes."""
        (said,) = changed("call save", "(_, _)", call).refused
        assert said.startswith(f"save is called with {call}, in 1.0 (name, kv, ")

    def test_call_with_a_word_that_goes_into_kwargs_is_taken(self):
        """A hook that takes any word takes a new one."""
        assert [] == changed("call save", "(_, _, new=_)").refused

    def test_field_of_another_type_is_refused(self):
        """What a step says is read as it was declared."""
        (said,) = changed("Output.ids", "list[str]").refused
        assert said == "Output.ids is list[str], in 1.0 set[str] | None"

    def test_field_that_moved_into_a_base_is_found(self):
        """A field is looked for in what its class derives from."""
        offered = {"Base": {"Root"}, "Root.ids": {"set[str] | None"}}
        assert [] == found(drop=["Output.ids"], **offered).refused

    def test_class_that_derives_from_its_own_name_ends(self):
        """A name that leads to itself is no circle to run in."""
        offered = {"Output": {"Output"}}
        assert ["Output.ids is gone"] == found(drop=["Output.ids"], **offered).refused

    @pytest.mark.parametrize(
        ("takes", "is_taken"),
        [
            ("(allow_none=False, *, group_ids=None)", True),
            ("(allow_none=False, *more, **words)", True),
            ("(allow_none=False, *, group_ids)", False),
            ("(group_ids, allow_none=False)", False),
            ("()", False),
            ("-> list", False),
        ],
    )
    def test_function_that_we_call_may_take_more(self, takes, is_taken):
        """Of what we call only what our calls need must stay."""
        assert is_taken == (not changed("Blocks.get", takes).refused)

    def test_setting_of_another_type_is_noted(self):
        """A setting goes into keys as it is; how it is declared is said."""
        result = changed("CacheConfig.size", "int | str")
        assert [] == result.refused
        assert ["CacheConfig.size is int | str, in 1.0 int"] == result.noted

    def test_abstract_hook_that_we_lack_is_refused(self):
        """The engine could not make our class."""
        result = found(abstract=["save", "fly"])
        assert ["fly is abstract"] == result.refused

    def test_new_hook_is_noted_and_private_names_are_not(self):
        """A hook that the base does nothing in is left to it, by name."""
        result = changed("KVConnectorBase_V1.fly", "()")
        assert ([], ["KVConnectorBase_V1.fly is new"]) == (
            result.refused,
            result.noted,
        )

    def test_names_of_other_classes_are_none_of_ours(self):
        """Fields and calls that the door does not use may come, go and change."""
        result = found(
            **{"Output.more": {"int"}, "call other": {"()"}, "Other": {"Other2"}}
        )
        assert ([], []) == (result.refused, result.noted)


def offered(version):
    """Return what a release offers; none of them has an abstract hook that we lack."""
    return Offer(api_of(version), ())


class TestReleases:
    def test_needs_are_those_of_the_door_today(self):
        """What is shipped is what the door reads and overrides."""
        text = TARGET.read_text(encoding="utf-8")
        made = dumps(needs_of(VERSIONS[-1]))
        assert made == text, "Run: python -m tests.golden.make_engine_needs"

    def test_newest_release_has_no_difference(self):
        """The release from which the needs were made is one that is taken."""
        result = differences(load_needs(), offered(VERSIONS[-1]))
        assert ([], []) == (result.refused, result.noted)

    def test_known_hooks_are_ours_or_left_on_purpose(self):
        """A hook counts as known only if somebody has thought about it."""
        dropped = {"prefer_cross_layer_blocks", "register_cross_layers_kv_cache"}
        named = UCMConnector.__dict__.keys() | INHERITED_ON_PURPOSE.keys() | dropped
        known = {name.partition(".")[2] for name in load_needs().known}
        assert set() == known - named - {"aggregate"}

    @pytest.mark.parametrize(("known", "release"), list(pairwise(VERSIONS)))
    def test_each_release_as_the_one_before_would_have_tried_it(self, known, release):
        """Of all releases only the one that renamed a field would have been
        refused by its predecessor's needs, and that by name."""
        refused = differences(Needs(**needs_of(known)), offered(release)).refused
        gone = ["KVCacheTensor.shared_by is gone"] if release == "0.29.0" else []
        assert gone == list(refused)

    def test_release_33_as_32_would_have_tried_it(self):
        """With this, vLLM 0.33 would have started, naming its three new hooks."""
        result = differences(Needs(**needs_of("0.32.0")), offered("0.33.0"))
        new = ("restore_kv_caches", "supports_sleep_mode", "unregister_kv_caches")
        assert [] == result.refused
        assert [
            "CacheConfig.cache_dtype is CacheDType | str, in 0.32 CacheDType",
            *(f"KVConnectorBase_V1.{name} is new" for name in new),
        ] == result.noted

    def test_release_that_lacks_much_is_refused_by_each_name(self):
        """The oldest release, taken for a new one, is refused for what it lacks."""
        refused = differences(load_needs(), offered("0.23.0")).refused
        assert {
            "KVConnectorBase_V1.get_transfer_results is gone",
            "KVCacheTensor.layers is gone",
            "SchedulerOutput.kv_connector_block_state is gone",
            "DEFAULT_NONE_HASH_SEED is gone",
        } <= set(refused)
