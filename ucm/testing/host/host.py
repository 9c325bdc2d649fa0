# SPDX-License-Identifier: Apache-2.0
"""
A fake engine around a connector, stricter than a real one.

It has a scheduler, a block pool, one runner per rank and an aggregator, and real bytes:
what a forward pass "computes" is a function of all tokens before it, and before each
pass every rank is looked at whether the whole prefix holds just that. A block that was
given back too early, a torn save or a wrong load is wrong content sooner or later, and
is named with request, rank, block and row.

There are no threads, no clock and no dice in here: every decision is taken by
``Choices``, so that a run repeats from a seed. Whoever drives the host calls ``act``,
any number of times, then ``drain`` and ``audit``::

    host = FakeHost(scheduler=connector, workers=[worker], memories=[memory], ...)
    for _ in range(1000):
        host.act()
    host.drain(idle=let_the_connectors_threads_run)
    assert not any(host.audit().values())
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from ucm.layout import KVLayout
from ucm.testing.host.aggregator import Aggregator
from ucm.testing.host.choices import Choices
from ucm.testing.host.content import Memory, make_streams
from ucm.testing.host.hooks import SchedulerHooks, WorkerHooks
from ucm.testing.host.requests import KVOutput, Request, Status
from ucm.testing.host.results import Results
from ucm.testing.host.rules import HostAssertionError, Rule, require
from ucm.testing.host.runner import FakeRunner
from ucm.testing.host.scheduler import FakeScheduler
from ucm.testing.host.settings import HostSettings
from ucm.testing.host.steps import Step

__all__ = ["FakeHost"]


def _nothing() -> None:
    """Do nothing between two steps."""


def _no_containers() -> Mapping[str, int]:
    return {}


class FakeHost:
    """
    The engine.

    Args:
        scheduler: The connector's scheduler side.
        workers: Its worker sides, by rank, with their memory registered.
        memories: By rank, ``[rows][blocks, page]`` bytes; row 0 decides the number of
            blocks. Overwritten at once.
        layout: Groups and rows.
        choices: Take every decision.
        settings: What kind of engine.
        shards: By rank, which part of a block it computes; each its own if none.
        layouts: By rank, where ranks have rows of their own; groups are alike.
        between: Called on each rank between what the engine overwrites and the hooks of
            the step: it prepares its inputs meanwhile.
        containers: Returns the sizes of the connector's own containers, which
            ``drain`` waits for and ``audit`` tells.
    """

    def __init__(
        self,
        *,
        scheduler: SchedulerHooks,
        workers: Sequence[WorkerHooks],
        memories: Sequence[Memory],
        layout: KVLayout,
        choices: Choices,
        settings: HostSettings | None = None,
        shards: Sequence[int] | None = None,
        layouts: Sequence[KVLayout] | None = None,
        between: Callable[[], None] = _nothing,
        containers: Callable[[], Mapping[str, int]] = _no_containers,
    ) -> None:
        settings = settings or HostSettings()
        self.seen: Counter[str] = Counter()
        self.settings = settings
        self._layout = layout
        self._choices = choices
        self._containers = containers
        require(
            not getattr(scheduler, "requires_kv_delivery", False),
            Rule.DELIVERY_REQUIRED,
            "requires_kv_delivery is True",
        )
        num_blocks = len(memories[0][0])
        self.scheduler = FakeScheduler(
            scheduler,
            layout,
            num_blocks=num_blocks,
            num_ranks=len(workers),
            choices=choices,
            settings=settings,
            seen=self.seen,
        )
        self._results = Results(self.scheduler, layout, choices, settings, self.seen)
        self._runners = [
            FakeRunner(
                rank,
                worker,
                memory,
                layouts[rank] if layouts else layout,
                shard=shards[rank] if shards else rank,
                choices=choices,
                settings=settings,
                seen=self.seen,
                between=between,
            )
            for rank, (worker, memory) in enumerate(zip(workers, memories, strict=True))
        ]
        every = (name for runner in self._runners for name in runner.layers)
        self._layers = tuple(dict.fromkeys(every))
        self._aggregator = Aggregator(len(workers))
        self._steps: deque[tuple[Step, list[KVOutput]]] = deque()
        self._held: list[deque[KVOutput]] = [deque() for _ in workers]
        length = settings.max_request_tokens
        self.streams = make_streams(
            length + 2 * layout.alignment_tokens,
            layout.hash_block_tokens,
            settings.num_streams,
        )
        """The texts that requests are cut from."""
        self._longest = min(length, self._room(num_blocks))
        self._used_ids: set[str] = set()

    def _room(self, num_blocks: int) -> int:
        """Return how many tokens of one request fit into memory."""
        share = (num_blocks - 1) // len(self._layout.groups)
        return share * min(group.block_tokens for group in self._layout.groups)

    # Acts.

    def act(self) -> str:
        """Do one thing that may happen to an engine, and return what it was."""
        odds, choices = self.settings.odds, self._choices
        requests = self.scheduler.requests
        if choices.chance("arrive", odds.arrive) and len(requests) < (
            self.settings.max_requests
        ):
            self.arrive()
            return "arrival"
        if choices.chance("abort", odds.abort):
            alive = [one for one in requests.values() if not one.is_finished()]
            if alive:
                self.abort(choices.pick("whom", alive))
                return "abort"
        if odds.reset and choices.chance("reset", odds.reset):
            self.seen["reset"] += 1
            self.scheduler.hooks.reset_cache()
            return "reset"
        if self.settings.local_cache and choices.chance("forget", odds.forget):
            self.seen["forgot"] += 1
            self.scheduler.pool.forget()
            return "forget"
        is_halted = self.scheduler.is_halted
        if odds.halt and choices.chance("halt", 0.1 if is_halted else odds.halt):
            self.seen["halted"] += not is_halted
            self.scheduler.is_halted = not is_halted
            return "halt"
        if self.is_asleep:
            self.seen["slept"] += 1
            return "sleep"
        self.step()
        return "step"

    @property
    def is_asleep(self) -> bool:
        """Whether no step is taken before somebody comes to the engine."""
        return not (self._steps or self.scheduler.has_requests())

    def arrive(self) -> Request:
        """Let a request come in, under an id that may have been used before."""
        choices, settings = self._choices, self.settings
        unused = [name for name in self._ids() if name not in self.scheduler.requests]
        name = choices.pick("id", unused)
        self.seen["id_reused"] += name in self._used_ids
        self._used_ids.add(name)
        output = 1 + choices.below("output", settings.max_output_tokens)
        longest = max(2, self._longest - output)
        length = 1 + choices.below("length", longest)
        align = self._layout.alignment_tokens
        if length > align and choices.chance("whole blocks", 0.4):
            length -= length % align
        request = Request(
            request_id=name,
            stream=choices.pick("stream", self.streams),
            num_prompt_tokens=length,
            max_tokens=output,
            hash_block_tokens=self._layout.hash_block_tokens,
            num_groups=len(self._layout.groups),
        )
        self.seen["arrived"] += 1
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """Let the user of a request go away."""
        self.seen[f"aborted_{request.status.value}"] += 1
        self.scheduler.finish(request, Status.FINISHED_ABORTED)

    def _ids(self) -> list[str]:
        in_flight = {
            request.request_id
            for step, _ in self._steps
            for request, _ in step.scheduled
        }
        names = (f"r{at}" for at in range(2 * self.settings.max_requests))
        return [name for name in names if name not in in_flight]

    def step(self) -> None:
        """Plan a step if there is one to plan; carry out and take in as many as must be."""
        if self._steps and not self.scheduler.has_requests():
            self._take_in()
            return
        step = self.scheduler.schedule()
        self.seen["step" if step.scheduled else "empty_step"] += 1
        self._steps.append((step, self._execute(step)))
        spare = self.settings.in_flight - len(self._steps)
        if spare <= 0 or self._choices.chance("catch up", 0.3):
            self._take_in()

    def _execute(self, step: Step) -> list[KVOutput]:
        """Let all ranks carry a step out; their forward passes are one."""
        for runner in self._in_any_order():
            runner.begin(step)
        for runner in self._runners:
            for wrong in runner.check(step):
                raise wrong.error
        tainted: set[str] = set()
        for layer in self._layers:
            runners = [each for each in self._runners if layer not in each.later]
            for runner in runners:
                tainted.update(wrong.reader for wrong in runner.read_layer(step, layer))
            for runner in runners:
                runner.write_layer(step, layer, tainted)
        outputs = [KVOutput()] * len(self._runners)
        for runner in self._in_any_order():
            outputs[runner.rank] = runner.end(step, tainted)
        for rank, output in enumerate(outputs):
            self.scheduler.registrations.check(
                rank, output, is_single_group=len(self._layout.groups) == 1
            )
        self.scheduler.registrations.loading_now.clear()
        return outputs

    def _in_any_order(self) -> list[FakeRunner]:
        runners = self._runners
        if len(runners) > 1:
            at = self._choices.below("rank order", len(runners))
            runners = runners[at:] + runners[:at]
        return runners

    def _take_in(self) -> None:
        """Take in the results of the oldest step in flight."""
        step, outputs = self._steps.popleft()
        arrived: list[KVOutput] = []
        for held, output in zip(self._held, outputs, strict=True):
            held.append(output)
            # Blocks that failed in a step are of no use in a later one.
            urgent = output.invalid_block_ids
            if (
                not urgent
                and len(held) < 4
                and self._choices.chance("hold back", self.settings.odds.hold_back)
            ):
                self.seen["held_back"] += 1
                continue
            arrived += held
            held.clear()
        self._results.process(step, self._aggregator.aggregate(arrived))

    # Weights.

    def pause(self, idle: Callable[[], None] = _nothing, steps: int = 200) -> bool:
        """
        Abort all requests and let the engine come to rest, as before it sleeps.

        Saves may still be on their way to the store.

        Args:
            idle: Called between two steps.
            steps: At most so many.

        Returns:
            Whether nobody has a block any more.
        """
        self.scheduler.is_halted = False
        for request in list(self.scheduler.requests.values()):
            if not request.is_finished():
                self.abort(request)
        for _ in range(steps):
            self.step()
            while self._steps:
                self._take_in()
            if not self.scheduler.pool.num_used:
                return True
            idle()
        return False

    def load_weights(self, version: int) -> None:
        """Compute with other weights from now on; every block there is is wrong."""
        self.seen["loaded_weights"] += 1
        for runner in self._runners:
            runner.load_weights(version)

    # The end.

    def drain(self, idle: Callable[[], None] = _nothing) -> int:
        """
        Let all requests come to their end, aborting half, and the connector to rest.

        Args:
            idle: Called between two steps; lets the connector's threads go on.

        Returns:
            Steps it took.

        Raises:
            HostAssertionError: Something did not end; says what is left.
        """
        self.scheduler.is_halted = False
        for request in list(self.scheduler.requests.values()):
            if not request.is_finished() and self._choices.chance("abort", 0.5):
                self.abort(request)
        for steps in range(self.settings.max_drain_steps):
            if not any(self.audit().values()):
                return steps
            self.step()  # also one that sleeps: as if somebody came back
            while self._steps:
                self._take_in()
            idle()
        left = {name: count for name, count in self.audit().items() if count}
        raise HostAssertionError(
            Rule.NEVER_ENDS,
            f"{left}, waiting for {self.scheduler.registrations.waiting()}",
        )

    def audit(self) -> dict[str, int]:
        """
        Return the size of each container; all zero when nothing is left.

        Raises:
            HostAssertionError: The null block was written to.
        """
        for runner in self._runners:
            runner.check_null_block()
        return {
            **self.scheduler.counts(),
            **self._aggregator.counts(),
            "steps_in_flight": len(self._steps),
            "outputs_held_back": sum(map(len, self._held)),
            **self._containers(),
        }
