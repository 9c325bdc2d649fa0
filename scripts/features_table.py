# SPDX-License-Identifier: Apache-2.0
"""
The table of ``docs/features.md``: features of the engine, and what ucm makes of them.

A row without a proof says "not run" or "read only"; a test sees that every proof exists.
"""

import enum
from collections.abc import Iterable

import attrs

__all__ = ["FEATURES", "Feature", "Verdict", "table"]

_DOOR = "integration/vllm"


class Verdict(enum.Enum):
    """What ucm makes of a feature of the engine."""

    HANDLED = "handled"
    FALLS_BACK = "falls back"
    """Blocks move in a simpler way than was asked for."""
    REFUSED = "refused by name"
    NOT_RUN = "not run"
    """Nothing in it is known to be wrong, and nothing is proven on an engine."""


@attrs.frozen
class Feature:
    """
    One feature of the engine.

    Args:
        name: In the engine's words.
        verdict: What ucm makes of it.
        says: What a user has to know; a sentence or two.
        proofs: Tests, as ``file::Class::test`` below ``tests``; a file alone stands for
            all of it.
    """

    name: str
    verdict: Verdict
    says: str
    proofs: tuple[str, ...] = ()


FEATURES: tuple[Feature, ...] = (
    Feature(
        "Asynchronous scheduling",
        Verdict.HANDLED,
        "Plans may be in flight; layer-wise loads fall back. The engine has it off on "
        "CPU, where the test switches it on.",
        (
            "e2e/test_features.py::test_batches_in_flight_are_exact_in_a_tiny_pool",
            f"{_DOOR}/test_host_runners.py::TestRunners",
            f"{_DOOR}/test_modes.py::TestTable",
        ),
    ),
    Feature(
        "Second model runner",
        Verdict.HANDLED,
        "It clears and copies onto blocks before it says so: such saves are torn, and "
        "where it may happen a save is stored only once the engine has seen its copy's "
        "end. Not run on an engine: it needs an accelerator.",
        (
            f"{_DOOR}/test_worker_steps.py::TestOverwrittenFirst",
            f"{_DOOR}/test_runner_orders.py::TestSecondRunner",
            f"{_DOOR}/test_host_runners.py::TestRunners",
        ),
    ),
    Feature(
        "Speculation, draft model",
        Verdict.HANDLED,
        "Layer-wise loads fall back. Draft layers are saved with the others, and the "
        "draft's weights are part of the key. After a hit of a whole prompt the first "
        "drafts are rejected, as with the engine's own cache.",
        (
            "e2e/test_features.py::test_draft_model_drafts_as_well_from_saved_blocks",
            "e2e/test_features.py::test_draft_model_that_guesses_badly_changes_no_token",
            f"{_DOOR}/test_keyspace.py::TestKeyspace::test_weights_of_a_draft_count",
        ),
    ),
    Feature(
        "Speculation, EAGLE and MTP",
        Verdict.HANDLED,
        "As with a draft model; so are EAGLE 3, and the layer of a model's own that predicts tokens (MiMo). The last draft block of a prefix depends on the next "
        "token: that may cost accepted drafts, never a token.",
        (
            "e2e/test_speculation.py::test_head_guesses_as_it_did_from_saved_blocks",
            "e2e/test_speculation.py::test_rejected_guesses_in_flight_are_saved_by_nobody",
        ),
    ),
    Feature(
        "Speculation on pipeline stages",
        Verdict.HANDLED,
        "Stages before the last never ask for saves; they save with their next step.",
        (f"{_DOOR}/test_worker_steps.py::TestUnsubmitted",),
    ),
    Feature(
        "Micro-batches (DBO)",
        Verdict.FALLS_BACK,
        "Layer-wise transfer falls back to whole blocks: a layer's hook comes once per "
        "part.",
        (f"{_DOOR}/test_modes.py::TestSetup", f"{_DOOR}/test_host_runners.py"),
    ),
    Feature(
        "Tensor parallel, pipeline stages, MLA",
        Verdict.HANDLED,
        "Each rank stores its part; identical parts are stored once.",
        ("e2e/test_topology.py::TestRanks",),
    ),
    Feature(
        "Data parallel",
        Verdict.HANDLED,
        "Engines of their own, which share keys and the store of their machine.",
        (
            "e2e/test_serve.py::TestServe::test_data_parallel_engines_find_what_each_other_saved",
        ),
    ),
    Feature(
        "Decode and prefill context parallel",
        Verdict.NOT_RUN,
        "Mapped, and proven on the fake engine.",
        (f"{_DOOR}/test_topology_host.py",),
    ),
    Feature(
        "LoRA",
        Verdict.HANDLED,
        "Adapters count by content. One whose files were written after the engine "
        "started is not reused, unless `immutable_adapters` is set. Load none in place "
        "while requests run with it: what they compute from then on is saved as of the one before.",
        (
            "e2e/test_keys.py::test_adapter_of_another_content_at_one_path_shares_nothing",
            f"{_DOOR}/test_adapters.py",
        ),
    ),
    Feature(
        "Multimodal input",
        Verdict.HANDLED,
        "The engine's hashes hold the images, the key holds the processor's settings. Refused by name where "
        "`mm_processor_cache_gb` is 0 and prefixes are not cached: the engine hashes no image then. Names that a "
        "user gives to images (`multi_modal_uuids`) are taken at their word, behind a restart as well. A test keeps a tiny Idefics 3; PaliGemma, Qwen2-VL, "
        "LLaVA and Gemma 3 were run by hand on CPU, with equal answers.",
        (
            "e2e/test_images.py::test_images_are_part_of_the_key",
            f"{_DOOR}/test_identity.py::TestFields",
            f"{_DOOR}/test_identity.py::TestReusable",
        ),
    ),
    Feature(
        "Prompt embeddings",
        Verdict.HANDLED,
        "The engine's hashes hold them.",
        ("e2e/test_features.py::test_prompt_embeddings_are_part_of_the_key",),
    ),
    Feature(
        "Cache salt",
        Verdict.HANDLED,
        "Tenants share nothing.",
        ("e2e/test_tenants.py::test_salt_keeps_tenants_apart",),
    ),
    Feature(
        "Input that streams",
        Verdict.HANDLED,
        "A session's first part is looked up; what it computes is saved.",
        ("e2e/test_features.py::test_streamed_input_goes_on_from_saved_blocks",),
    ),
    Feature(
        "Pooling of the last token",
        Verdict.HANDLED,
        "The same vectors from saved blocks.",
        ("e2e/test_features.py::test_pooling_model_gives_the_same_vectors",),
    ),
    Feature(
        "Log-probabilities of prompts",
        Verdict.HANDLED,
        "A request that asks for them skips prefix caches: it loads nothing, and is saved.",
        (
            "e2e/test_features.py::test_log_probabilities_of_prompts_are_computed_anew",
            f"{_DOOR}/test_wishes.py::TestHalves",
        ),
    ),
    Feature(
        "Pooling over all tokens, models without a KV cache",
        Verdict.REFUSED,
        "A hit would leave tokens out; there is nothing to save.",
        (
            f"{_DOOR}/test_identity.py::TestReusable",
            "e2e/test_refusals.py::TestModels::test_encoder_is_refused",
        ),
    ),
    Feature(
        "Routed experts in answers (`enable_return_routed_experts`)",
        Verdict.REFUSED,
        "The experts of tokens that are loaded are not known. An engine that only saves (`kv_producer`) "
        "may return them.",
        (f"{_DOOR}/test_identity.py::TestReusable",),
    ),
    Feature(
        "Encoder-decoder models",
        Verdict.NOT_RUN,
        "The engine itself refuses them beside any connector.",
    ),
    Feature(
        "KV cache in fp8",
        Verdict.HANDLED,
        "Its type is part of the key. `calculate_kv_scales`, whose scales are of one "
        "start, is refused.",
        (
            "e2e/test_features.py::test_fp8_cache_is_restored_as_it_was",
            f"{_DOOR}/test_identity.py::TestReusable",
        ),
    ),
    Feature(
        "Weights that cannot be seen (object storage, GGUF)",
        Verdict.REFUSED,
        "`weights_revision` names them.",
        ("e2e/test_refusals.py::TestModels",),
    ),
    Feature(
        "Weights reloaded in place, weight transfer",
        Verdict.HANDLED,
        "See [weights](weights.md): empty the engine's own cache, as for the engine "
        "itself.",
        ("e2e/test_weights.py::TestWeights", f"{_DOOR}/test_doubts.py::TestChanged"),
    ),
    Feature(
        "Reset of the prefix cache, pause",
        Verdict.HANDLED,
        "Nothing is lost while the weights are the same, and no other engine notices.",
        (f"{_DOOR}/test_doubts.py::TestSame", "e2e/test_weights.py::TestWeights"),
    ),
    Feature(
        "Sleep",
        Verdict.HANDLED,
        "The KV cache is let go of and taken again. On CPU the engine sleeps in name "
        "only; not run on an accelerator.",
        (f"{_DOOR}/test_doubts.py::TestSleep", "e2e/test_weights.py::TestWeights"),
    ),
    Feature(
        "MultiConnector",
        Verdict.HANDLED,
        "As a child, beside others or twice.",
        ("e2e/test_multi.py",),
    ),
)
"""In the order of the page."""


def table() -> Iterable[str]:
    """Yield the lines between the markers."""
    yield "| feature | ucm | what it means | proven by |"
    yield "|---|---|---|---|"
    for one in FEATURES:
        proofs = ", ".join(f"`{proof}`" for proof in one.proofs) or "nothing"
        yield f"| {one.name} | {one.verdict.value} | {one.says} | {proofs} |"
