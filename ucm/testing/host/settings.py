# SPDX-License-Identifier: Apache-2.0
"""What kind of engine a fake host is, and how likely each act is."""

import attrs

__all__ = ["HostSettings", "Odds"]


@attrs.frozen(kw_only=True)
class Odds:
    """
    How likely each act is, where there is something to do it to.

    Args:
        arrive: A request comes in, per act.
        abort: A request is aborted, per act.
        reset: The connector's cache is reset, per act.
        forget: The engine's own prefix cache is reset, per act.
        halt: The engine schedules nothing for a while, and leaves all as it is, per act.
        preempt: A running request is preempted, per request and step.
        resume: Requests are admitted in the step that preempted some.
        admit: A waiting request is looked at, per request and step.
        decline: The engine loads nothing though the connector offered to.
        empty: A step computes nothing.
        repeat: A hook is called once more, per call; twice more by chance again.
        early_results: Results are asked for before ``wait_for_save``, per step.
        bind_first: Metadata is bound before ``handle_preemptions``, per step.
        hold_back: A rank's output reaches the scheduler only later, per step.
        stop_early: A request ends before its last token, per token.
        newest: Blocks are handed out last in, first out, per step.
        late_load: A load is ordered only when the steps in flight have ended.
        copy: The engine copies a state to a block that nobody has, per step.
    """

    arrive: float = 0.2
    abort: float = 0.03
    reset: float = 0.0
    forget: float = 0.002
    halt: float = 0.0
    preempt: float = 0.02
    resume: float = 0.3
    admit: float = 0.8
    decline: float = 0.05
    empty: float = 0.05
    repeat: float = 0.05
    early_results: float = 0.1
    bind_first: float = 0.1
    hold_back: float = 0.1
    stop_early: float = 0.02
    newest: float = 0.6
    late_load: float = 0.2
    copy: float = 0.2


@attrs.frozen(kw_only=True)
class HostSettings:
    """
    The engine.

    Args:
        num_streams: Texts that requests are cut from.
        max_request_tokens: Longest prompt with its output.
        max_output_tokens: Longest output.
        max_requests: Most requests in the engine.
        step_tokens: Token budgets of a step, one of which is chosen.
        local_cache: Whether the engine has a prefix cache of its own.
        partial_hits: Whether its hits may end inside a block.
        recomputes: Whether failed loads are recomputed; their requests fail otherwise.
        in_flight: Steps that may be planned before their results are known, at most
            2; with 2 the engine schedules asynchronously.
        clears: Whether new blocks are cleared before a forward pass.
        overwrites_first: Whether that, and copies, come before any hook of the step:
            the order of vLLM's second model runner.
        defers_saves: Whether ``wait_for_save`` comes after results were asked for, as it
            does with speculation.
        draft_layers: Layers, of the last ones, that run after the others: behind the
            results where saves are deferred.
        parts: Micro-batches of a forward pass, each of which calls all layers' hooks.
        silent_ranks: Ranks that are never asked for the saves of a step that computes:
            stages before the last, with speculation, on the first model runner.
        max_metadata_bytes: Bound of what is sent to a worker in a step.
        max_drain_steps: In which ``drain`` must succeed.
        odds: How likely each act is.
    """

    num_streams: int = 4
    max_request_tokens: int = 96
    max_output_tokens: int = 12
    max_requests: int = 8
    step_tokens: tuple[int, ...] = (1, 7, 16, 48, 128)
    local_cache: bool = False
    partial_hits: bool = False
    recomputes: bool = True
    in_flight: int = 1
    clears: bool = False
    overwrites_first: bool = False
    defers_saves: bool = False
    draft_layers: int = 0
    parts: int = 1
    silent_ranks: frozenset[int] = frozenset()
    max_metadata_bytes: int = 1 << 16
    max_drain_steps: int = 2000
    odds: Odds = attrs.Factory(Odds)
