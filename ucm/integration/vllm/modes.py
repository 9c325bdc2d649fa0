# SPDX-License-Identifier: Apache-2.0
"""
How blocks are saved and loaded, decided in one place from flags and facts.

``RULES`` is the decision: the first rule whose ``when`` agrees with the facts holds. Its
order is the precedence: mock by ``hit_ratio``, micro-batches, context parallel,
layer-wise by what the layout and the engine allow, whole blocks. Pure; both halves of the connector decide
alike.

Why loads are layer-wise under conditions: such a load has no request of its own that
waits, so the only way to tell that it failed are the ids of invalid blocks, at the end
of the step. vLLM 0.32 takes these for layouts of one group only, copies the states of
recurrent groups before ``start_load_kv``, and, where batches overlap, has by then begun
the next step on what was not loaded: seen to end the engine.
Source: ``vllm.v1.core.sched.scheduler.Scheduler._handle_invalid_blocks``.
"""

import enum
from collections.abc import Mapping

import attrs

from ucm.config import Switch
from ucm.layout import GroupKind, KVLayout

__all__ = [
    "DIRECT",
    "ROLES",
    "RULES",
    "Facts",
    "Loads",
    "Mode",
    "Rule",
    "Saves",
    "Shape",
    "choose_mode",
    "contradicts",
    "shape_of",
]

ROLES = {
    "kv_both": (True, True),
    "kv_producer": (True, False),
    "kv_consumer": (False, True),
}
"""Whether an engine of this ``kv_role`` saves, and whether it loads."""

_ATTENTION = frozenset({GroupKind.FULL, GroupKind.WINDOW})


class Saves(enum.Enum):
    """When a block's bytes leave the engine."""

    NOTHING = "nothing"
    WHOLE = "whole blocks"
    """After the forward pass, all rows at once."""
    LAYERWISE = "layer-wise"
    """Row by row, as soon as the last layer of a row has run."""


class Loads(enum.Enum):
    """When a block's bytes reach the engine."""

    NOTHING = "nothing"
    ASYNC = "asynchronous"
    """While the request is parked; it runs when all is there."""
    LAYERWISE = "layer-wise"
    """While the request runs: each layer waits for its own row."""
    CLAIMED = "claimed"
    """Never: hits are made up and their blocks hold garbage."""


class Shape(enum.Enum):
    """What the groups of a layout have in common."""

    SINGLE = "one group of full attention"
    SEVERAL = "windows or several groups"
    """Attention all the same, of which old blocks may be gone."""
    RECURRENT = "recurrent groups"
    """Some group holds states instead of tokens, whatever else there is."""


@attrs.frozen(kw_only=True)
class Facts:
    """
    All that the mode depends on.

    Args:
        is_mock: ``hit_ratio`` is set.
        context_parallel: A block's tokens are cut over ranks.
        use_layerwise: The operator's wish.
        shape: The layout's groups.
        overlapping_batches: The engine begins a step before it knows how the former
            ended: asynchronous scheduling, or pipeline stages.
        local_cache: The engine finds blocks again in its own cache.
        micro_batches: The engine may run a forward pass in parts, each of which calls
            the hooks of every layer.
        speculation: A drafter may run behind the forward pass, with layers of its own.
        kv_role: One of ``ROLES``.
        writes_back: An engine that only loads saves nevertheless what it decodes.
    """

    is_mock: bool = False
    context_parallel: bool = False
    use_layerwise: bool = False
    shape: Shape = Shape.SINGLE
    overlapping_batches: bool = False
    local_cache: bool = False
    micro_batches: bool = False
    speculation: bool = False
    kv_role: str = attrs.field(default="kv_both", validator=attrs.validators.in_(ROLES))
    writes_back: bool = False


@attrs.frozen(kw_only=True)
class Mode:
    """
    How this engine's blocks are saved and loaded.

    Args:
        name: The rule that was chosen.
        saves: When bytes leave the engine.
        loads: When bytes reach it.
        reason: Why, for log and documentation.
        is_mock: Nothing moves and the output is garbage.
        saves_prompts: Blocks within prompts are saved as well, if any are.
    """

    name: str
    saves: Saves
    loads: Loads
    reason: str
    is_mock: bool = False
    saves_prompts: bool = True


@attrs.frozen
class Rule:
    """A mode and the facts, by field, that it takes."""

    mode: Mode
    when: Mapping[str, object]

    def takes(self, facts: Facts) -> bool:
        """Return whether every named fact is as the rule asks."""
        return all(getattr(facts, name) == value for name, value in self.when.items())


RULES = (
    Rule(
        Mode(
            name="mock",
            saves=Saves.NOTHING,
            loads=Loads.CLAIMED,
            is_mock=True,
            reason="`hit_ratio` makes up hits for sizing: no byte moves, the output is "
            "garbage, and garbage must not be stored.",
        ),
        {"is_mock": True},
    ),
    Rule(
        Mode(
            name="layerwise-microbatches",
            saves=Saves.WHOLE,
            loads=Loads.ASYNC,
            reason="A forward pass that runs in parts tells of each layer once per part: "
            "a row is written only when the last of them is through.",
        ),
        {"use_layerwise": True, "micro_batches": True},
    ),
    Rule(
        Mode(
            name="context-parallel-layerwise",
            saves=Saves.LAYERWISE,
            loads=Loads.ASYNC,
            reason="Each rank saves its share of a block layer by layer; requests wait "
            "for their loads, as the other way is not proven with such ranks.",
        ),
        {"context_parallel": True, "use_layerwise": True},
    ),
    Rule(
        Mode(
            name="context-parallel",
            saves=Saves.WHOLE,
            loads=Loads.ASYNC,
            reason="Each rank saves and loads its share of whole blocks.",
        ),
        {"context_parallel": True},
    ),
    Rule(
        Mode(
            name="layerwise-recurrent",
            saves=Saves.LAYERWISE,
            loads=Loads.ASYNC,
            reason="The engine copies the states of recurrent groups before the loads "
            "of a step begin.",
        ),
        {"use_layerwise": True, "shape": Shape.RECURRENT},
    ),
    Rule(
        Mode(
            name="layerwise-groups",
            saves=Saves.LAYERWISE,
            loads=Loads.ASYNC,
            reason="The engine hears of a load that fails during the forward pass for "
            "layouts of one group only, and computes again from there: before it a "
            "window has kept nothing.",
        ),
        {"use_layerwise": True, "shape": Shape.SEVERAL},
    ),
    Rule(
        Mode(
            name="layerwise-speculation",
            saves=Saves.LAYERWISE,
            loads=Loads.ASYNC,
            reason="A drafter runs after the engine has asked which loads failed; layers "
            "of its own would wait for rows too late.",
        ),
        {"use_layerwise": True, "speculation": True},
    ),
    Rule(
        Mode(
            name="layerwise-overlapping",
            saves=Saves.LAYERWISE,
            loads=Loads.ASYNC,
            reason="Batches overlap: before the engine hears that a load failed it has "
            "begun the next token from it. Layer-wise loads need "
            "`--no-async-scheduling` and no pipeline stages.",
        ),
        {"use_layerwise": True, "overlapping_batches": True},
    ),
    Rule(
        Mode(
            name="layerwise-cached",
            saves=Saves.LAYERWISE,
            loads=Loads.ASYNC,
            reason="The engine's own cache keeps blocks whose load failed, and gives them "
            "to others before they are computed. Layer-wise loads need "
            "`--no-enable-prefix-caching`.",
        ),
        {"use_layerwise": True, "local_cache": True},
    ),
    Rule(
        Mode(
            name="layerwise",
            saves=Saves.LAYERWISE,
            loads=Loads.LAYERWISE,
            reason="One group of full attention and one batch at a time: a load that "
            "fails is told by its blocks.",
        ),
        {"use_layerwise": True},
    ),
    Rule(
        Mode(
            name="direct",
            saves=Saves.WHOLE,
            loads=Loads.ASYNC,
            reason="Whole blocks move outside the forward pass.",
        ),
        {},
    ),
)
"""The table. The first rule that takes the facts holds; the last takes all."""

DIRECT = RULES[-1].mode
"""The mode without any flag."""


def choose_mode(facts: Facts) -> Mode:
    """Return the mode of an engine; its role takes away what it does not do."""
    mode = next(rule.mode for rule in RULES if rule.takes(facts))
    saves, loads = ROLES[facts.kv_role]
    return attrs.evolve(
        mode,
        saves=mode.saves if saves or facts.writes_back else Saves.NOTHING,
        saves_prompts=saves,
        loads=mode.loads if loads else Loads.NOTHING,
    )


def shape_of(layout: KVLayout) -> Shape:
    """Return what a layout's groups have in common."""
    if any(group.kind not in _ATTENTION for group in layout.groups):
        return Shape.RECURRENT
    kinds = [group.kind for group in layout.groups]
    return Shape.SINGLE if kinds == [GroupKind.FULL] else Shape.SEVERAL


def contradicts(claim: Switch, shape: Shape) -> bool:
    """Return whether ``use_hybrid_linear_attention`` says other than was detected."""
    detected = Switch.TRUE if shape is Shape.RECURRENT else Switch.FALSE
    return claim not in (Switch.AUTO, detected)
