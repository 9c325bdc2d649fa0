# SPDX-License-Identifier: Apache-2.0
"""``ucm doctor``: what of a machine, a store or an engine's settings is wrong, with remedies."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from ucm.agent.joining import check_records, check_tiers
from ucm.cli.given import Given, read_given, settings_options
from ucm.cli.main import NOT_WELL
from ucm.cli.output import console, json_option, say_json, table
from ucm.cli.telling import Number, examples
from ucm.cli.tidying import tidily
from ucm.config import StoreConfig, UCMConfig, python_hash_seed
from ucm.doctor.engine import EngineFacts, check_engine
from ucm.doctor.findings import Finding, Severity, note, refused, wrong
from ucm.doctor.machine import check_machine, gather_machine
from ucm.doctor.place import check_place, within
from ucm.doctor.sizing import (
    Deployment,
    ModelFacts,
    Sizes,
    UnsizedError,
    check_sizes,
    model_of,
    sizes_of,
)
from ucm.doctor.start import check_log, check_store_type
from ucm.doctor.tiers import check_apart, check_tier
from ucm.doctor.trial import try_round_trip
from ucm.errors import ConfigError
from ucm.stores.slab import SlabLook, is_in_memory, look

__all__ = ["doctor"]

_ANSWERS_S = 5.0
_POSITIVE = click.IntRange(1, 1 << 16)


@click.command(
    epilog=examples(
        "ucm doctor /models/Qwen3-8B --file serve.yaml --tokens-per-second 5000"
    )
)
@click.argument("model", required=False)
@settings_options
@click.option("--tensor-parallel-size", "-tp", type=_POSITIVE, help="Ranks of a layer.")
@click.option("--pipeline-parallel-size", "-pp", type=_POSITIVE, help="Stages.")
@click.option("--block-size", type=_POSITIVE, help="Tokens of a block.")
@click.option(
    "--kv-cache-dtype", help="Such as auto, float16, bfloat16, float32 or fp8."
)
@click.option("--prefix-caching-hash-algo", help="Of the engine; sha256 if left out.")
@click.option(
    "--tokens-per-second",
    type=Number(0),
    default=0.0,
    help="New tokens of prompts over all engines of the node.",
)
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    metavar="JSON",
    help='A tier to try, such as {"type": "disk", "path": "/mnt/a"}.',
)
@click.option("--no-trial", is_flag=True, help="Make no temporary store.")
@json_option
def doctor(
    model: str | None,
    file: str | None,
    transfer: str | None,
    tokens_per_second: float,
    tiers: tuple[str, ...],
    *,
    no_trial: bool,
    as_json: bool,
    **options: Any,  # noqa: ANN401 - those of the engine, by name
) -> int:
    """
    Look for what is wrong before an engine starts.

    MODEL is a local directory with the model's config.json; with it the doctor says how
    many tokens fit. What an engine's file says (--file) need not be said again. Nothing
    is changed; a temporary store beside yours goes again at once.

    Exit codes: 0 nothing is wrong, 1 something is, 2 a setting cannot be used,
    3 a file cannot be read.
    """
    given = read_given(file, transfer)
    own = {key: options[key] for key in options if options[key]}
    tried = [*map(_mapping, tiers)]
    with console(stderr=True).status("Looking"):  # on a terminal only
        findings = [
            *dict.fromkeys(  # what two entries have in common is told once
                found
                for each in (given, *given.others)
                for found in _examine(
                    each.configuration.config,
                    _Engine.of(each, own),
                    model,
                    tried if each is given else [],
                    tokens_per_second,
                    tries=not no_trial,
                )
            )
        ]
    is_wrong = any(each.severity is Severity.WRONG for each in findings)
    if as_json:
        say_json({"well": not is_wrong, "findings": [*map(attrs.asdict, findings)]})
    else:
        _show(findings)
    return NOT_WELL if is_wrong else 0


def _examine(
    config: UCMConfig,
    engine: "_Engine",
    model: str | None,
    tiers: Sequence[Mapping[str, object]],
    tokens_per_second: float,
    *,
    tries: bool,
) -> Iterator[Finding]:
    """Yield all that is found of one entry of ours."""
    sized = engine.sizes(model)
    block_bytes = 0 if isinstance(sized, Finding) else sized[1].block_bytes
    yield from check_engine(engine.facts)
    yield from check_machine(gather_machine(), config)
    yield from _check_store(config.store, sized, tokens_per_second, tries=tries)
    if block_bytes:
        yield from engine.assumed()
    yield from _check_tiers(config, (*config.tiers, *tiers), block_bytes)
    yield from _refused("queue", lambda: config.queue.check_holds(block_bytes))
    yield from _refused("KV events", lambda: check_records(config))
    yield from _refused("log", lambda: check_log(config.log))


@attrs.frozen
class _Engine:
    """What was said of the engine, on the command line or in its file."""

    facts: EngineFacts
    model: str
    how: Deployment
    is_block_size_said: bool

    @classmethod
    def of(cls, given: Given, options: Mapping[str, Any]) -> "_Engine":
        said = {str(key).replace("-", "_"): given.engine[key] for key in given.engine}
        said |= options
        versions, config = gather_machine().packages, given.configuration.config
        how = Deployment(
            tensor_parallel=_number(said, "tensor_parallel_size", 1),
            pipeline_parallel=_number(said, "pipeline_parallel_size", 1),
            block_tokens=_number(said, "block_size", _block_size_of(versions)),
            kv_dtype=str(said.get("kv_cache_dtype", "auto")),
        )
        facts = EngineFacts(
            transfer=given.transfer,
            version=versions.get("vllm", ""),
            hash_algorithm=str(said.get("prefix_caching_hash_algo", "sha256")),
            hash_seed=python_hash_seed(),
            writes_back=config.consumer_saves_decoded,
            hit_ratio=config.hit_ratio,
        )
        return cls(facts, str(said.get("model", "")), how, "block_size" in said)

    def assumed(self) -> Iterator[Finding]:
        """Tell what else would be needed to be sure."""
        if not self.is_block_size_said:
            yield note(
                "block size",
                f"nobody says it: {self.how.block_tokens} tokens are assumed, which vLLM "
                "takes for most models",
                "If the engine's log has another block_size, say it with --block-size.",
            )

    def sizes(self, model: str | None) -> "tuple[ModelFacts, Sizes] | Finding":
        """
        Return what blocks need; why nobody can say it, of a model that is not here too.

        Raises:
            ConfigFileError: The model that was named cannot be read.
        """
        if model is None and not Path(self.model, "config.json").is_file():
            return note(
                "capacity",
                "no model was named, so nobody can say what fits",
                "Name the model's local directory.",
            )
        try:
            facts = model_of(Path(model or self.model), self.how.kv_dtype)
        except UnsizedError as exc:
            text = f"{exc.key}={exc.shown}: {exc.problem}"
            return note("capacity", text, exc.remedy)
        return facts, sizes_of(facts, self.how)


def _mapping(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise click.BadParameter(f"no JSON: {exc}", param_hint="--tier") from exc
    if not isinstance(found, dict):
        raise click.BadParameter("no mapping", param_hint="--tier")
    return found


def _number(said: Mapping[str, Any], name: str, default: int) -> int:
    value = said.get(name, default)
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value[:20])  # the engine reads its file as a command line
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise click.UsageError(f"{name.replace('_', '-')} is {value!r}, no number")
    return value


def _block_size_of(packages: Mapping[str, str]) -> int:
    """Return what vLLM takes where nobody says it, by the device it was built for."""
    return 128 if "+cpu" in packages.get("vllm", "") else 16


def _check_store(
    store: StoreConfig,
    sized: tuple[ModelFacts, Sizes] | Finding,
    tokens_per_second: float,
    *,
    tries: bool,
) -> Iterator[Finding]:
    """Look at the store's place, and no further if that does not answer."""
    if store.type != "slab":
        nothing = note(
            "store", f"store.type is {store.type}: there is nothing to look at"
        )
        yield from _refused("store", lambda: check_store_type(store)) or [nothing]
        return
    block_bytes = None if isinstance(sized, Finding) else sized[1].block_bytes
    asked = _ask(store, block_bytes)
    if asked is None:
        remedy = "Look at the mount; an engine would wait for it as well."
        yield wrong("store", f"{store.path} does not answer", remedy)
        return
    directory, seen = asked
    yield from check_place(store, seen, block_bytes)
    if tries and seen.rooms:
        is_free = not (seen.problems or seen.data_bytes)
        yield _try(directory, Path(store.path) if is_free else None)
    if isinstance(sized, Finding):
        yield sized
    else:
        yield from check_sizes(
            *sized,
            capacity=store.capacity,
            num_slots=seen.num_slots,
            tokens_per_second=tokens_per_second,
        )


def _check_tiers(
    config: UCMConfig, tiers: Sequence[Mapping[str, object]], block_bytes: int
) -> Iterator[Finding]:
    for found in _refused("tier", lambda: check_tiers(config)):
        if not found.text.startswith("tiers."):  # of which each is told on its own
            yield found
    told = [
        check_tier(tier, f"tiers.{at}", block_bytes=block_bytes)
        for at, tier in enumerate(tiers)
    ]
    yield from told
    if all(each.severity is not Severity.WRONG for each in told):  # else it is told
        yield from _refused("tier", lambda: check_apart(config))


def _refused(check: str, call: Callable[[], None]) -> list[Finding]:
    """Return what a check refuses."""
    try:
        call()
    except ConfigError as exc:
        return [refused(check, exc)]
    return []


def _ask(store: StoreConfig, block_bytes: int | None) -> tuple[Path, SlabLook] | None:
    """Return where something may be tried, and what is found; None if it hangs."""
    directory = within(_ANSWERS_S, lambda: _existing(Path(store.path)))
    if directory is None:
        return None
    seen = within(_ANSWERS_S, lambda: look(store, block_bytes))
    return None if seen is None else (directory, seen)


def _existing(path: Path) -> Path:
    """Return the directory in which something may be tried: the slab's parent, or above."""
    for each in path.absolute().parents:
        if os.path.isdir(each):
            return each
    return Path("/")


def _try(directory: Path, path: Path | None) -> Finding:
    """Try a store beside the slab, or in *path*, which is free: a mount of its own, maybe."""
    if not is_in_memory(directory):
        if path is None:
            return note("round trip", f"not tried: {directory} is no memory")
        directory = path
    if not os.access(directory, os.W_OK):
        return note("round trip", f"not tried: {directory} cannot be written to")
    with tidily():
        return try_round_trip(directory)


def _show(findings: list[Finding]) -> None:
    order = [*Severity]
    rows = [
        (each.severity.value, each.check, each.text, each.remedy)
        for each in sorted(
            findings, key=lambda each: order.index(each.severity), reverse=True
        )
    ]
    console().print(table("", ("", "check", "found", "remedy"), rows))
