# SPDX-License-Identifier: Apache-2.0
"""Each rule of the fake host bites: a connector spoilt in one way breaks that one."""

from pathlib import Path

import attrs
import pytest

from tests.testing.host_kit import HYBRID, ONE_FULL, run, tiny_host
from tests.testing.tiny_connector import Plan, TinyScheduler, TinyWorker, WorkerInStep
from ucm.testing.host import HostAssertionError, HostSettings, Odds, Rule

CALM = HostSettings(odds=Odds(repeat=0.0, abort=0.02))


def broken_by(
    scheduler: type = TinyScheduler,
    worker: type = TinyWorker,
    *,
    layout=ONE_FULL,
    settings: HostSettings = CALM,
    **options,
) -> HostAssertionError:
    """Run a spoilt connector until the host has enough of it."""

    def spoilt_run() -> None:
        run(tiny_host(layout, scheduler, worker, settings=settings, **options), 3000)

    with pytest.raises(HostAssertionError) as caught:
        spoilt_run()
    return caught.value


def spoilt_worker(**methods) -> type:
    """Return a worker with other methods."""
    return type("SpoiltWorker", (TinyWorker,), methods)


def spoilt_scheduler(**methods) -> type:
    """Return a scheduler's side with other methods."""
    return type("SpoiltScheduler", (TinyScheduler,), methods)


def also_tells(change):
    """Return a ``get_transfer_results`` that changes the correct one's answer."""

    def results(self, finished):
        found = TinyWorker.get_transfer_results(self, finished)
        change(self, found)
        return found

    return results


class TestReports:
    def test_unknown_request_is_caught(self) -> None:
        """H-01: a report of a request that never was names it."""

        def change(worker, found) -> None:
            found.finished_recving = {"nobody"}

        error = broken_by(worker=spoilt_worker(get_transfer_results=also_tells(change)))
        assert Rule.REPORT_UNKNOWN is error.rule
        assert {"request": "nobody", "rank": 0} == error.ids

    def test_report_without_a_load_is_caught(self) -> None:
        """H-01: a request that saves is not reported as received."""

        def change(worker, found) -> None:
            found.finished_recving |= {save.request_id for _, save in worker.saves}

        worker = spoilt_worker(get_transfer_results=also_tells(change))
        assert Rule.REPORT_UNREGISTERED is broken_by(worker=worker).rule

    def test_load_that_the_engine_declined_is_caught(self) -> None:
        """H-07: whoever loads because of its own lookup reports what nobody waits
        for."""

        def allocated(self, request, blocks, external) -> None:
            computed = self.asked[request.request_id]
            found, _ = self.get_num_new_matched_tokens(request, computed)
            tables = blocks.get_block_ids()
            room = min(map(len, tables)) * 4 // 4 * 4
            external = external or max(0, min(found, room - computed))
            TinyScheduler.update_state_after_alloc(self, request, blocks, external)

        scheduler = spoilt_scheduler(update_state_after_alloc=allocated)
        assert Rule.REPORT_UNREGISTERED is broken_by(scheduler).rule

    def test_second_report_is_caught(self) -> None:
        """H-01: the same load told in two steps is one too many."""

        def change(worker, found) -> None:
            again = vars(worker).setdefault("again", set())
            found.finished_recving |= again
            worker.again = set(found.finished_recving)

        worker = spoilt_worker(get_transfer_results=also_tells(change))
        rules = {Rule.REPORT_TWICE, Rule.REPORT_UNREGISTERED, Rule.REPORT_UNKNOWN}
        assert broken_by(worker=worker).rule in rules

    def test_second_answer_in_a_step_is_caught(self) -> None:
        """S2-07: results that are asked for twice are told once."""

        def results(self, finished):
            found = TinyWorker.get_transfer_results(self, finished)
            if getattr(self, "last", (0,))[0] == self.step:
                found.finished_recving |= self.last[1]
            self.last = self.step, set(found.finished_recving)
            return found

        error = broken_by(
            worker=spoilt_worker(get_transfer_results=results),
            settings=HostSettings(odds=Odds(repeat=0.5)),
        )
        assert Rule.REPORT_TWICE is error.rule

    def test_release_of_a_running_request_is_caught(self) -> None:
        """H-01: a save that is over says nothing of a request that runs on."""

        def change(worker, found) -> None:
            found.finished_sending |= {save.request_id for _, save in worker.saves}

        worker = spoilt_worker(get_transfer_results=also_tells(change))
        assert Rule.SENT_UNFINISHED is broken_by(worker=worker).rule

    def test_report_in_both_directions_is_caught(self) -> None:
        """H-02: blocks of an aborted load are freed once; to keep them for a save of an
        earlier life as well crashes a real engine."""

        def forget_life(self, name) -> None:
            self.cursors.pop(name, None)

        error = broken_by(
            spoilt_scheduler(_forget_life=forget_life),
            settings=HostSettings(odds=Odds(abort=0.15, preempt=0.3, resume=1.0)),
        )
        assert Rule.REPORT_UNKNOWN is error.rule

    def test_failure_without_reception_is_caught(self) -> None:
        """H-05: a failed load is told in both sets of one output."""

        def change(worker, found) -> None:
            found.failed_recving, found.finished_recving = found.finished_recving, set()

        worker = spoilt_worker(get_transfer_results=also_tells(change))
        assert Rule.FAILED_NOT_RECEIVED is broken_by(worker=worker).rule

    @pytest.mark.parametrize("layout", [ONE_FULL, HYBRID], ids=["full", "hybrid"])
    def test_failed_blocks_of_nobody_are_caught(self, layout) -> None:
        """S4-15: block ids name no request of a hybrid, and none that is not loading."""

        def load(self, ticket) -> None:
            TinyWorker.load(self, ticket)
            where = ticket.blocks[0][1] if layout is HYBRID else 0
            self.bad_blocks.add(where)

        error = broken_by(worker=spoilt_worker(load=load), layout=layout)
        assert Rule.FAILED_BLOCKS is error.rule

    def test_failed_blocks_told_twice_are_caught(self) -> None:
        """S3-09: the set of failed blocks is cleared once it was told."""

        class Worker(WorkerInStep):
            def get_block_ids_with_load_errors(self) -> set[int]:
                return self.bad_blocks.copy()

        settings = HostSettings(odds=Odds(repeat=0.9))
        error = broken_by(worker=Worker, in_step=True, settings=settings)
        assert error.rule in {Rule.ERRORS_TWICE, Rule.FAILED_BLOCKS}


class TestEnds:
    @pytest.mark.parametrize("field", ["finished_sending", "finished_recving"])
    def test_silent_rank_is_caught(self, field) -> None:
        """H-03: what one rank never tells never ends, and the message names it."""

        def change(worker, found) -> None:
            if worker.rank == 1:
                setattr(found, field, set())
                found.failed_recving = set()

        worker = spoilt_worker(get_transfer_results=also_tells(change))
        settings = attrs.evolve(CALM, max_drain_steps=50)
        error = broken_by(worker=worker, settings=settings)
        assert Rule.NEVER_ENDS is error.rule
        assert "[1]" in str(error)


class TestContent:
    def test_save_without_fences_is_caught(self) -> None:
        """S1-07, S1-09: whoever reads on while blocks are used again stores garbage,
        which the next load brings up."""
        error = broken_by(
            worker=spoilt_worker(handle_preemptions=lambda self, plan: None),
            layout=HYBRID,
        )
        assert Rule.CONTENT is error.rule
        assert {"request", "rank", "block", "row", "index"} < set(error.ids)

    def test_wrong_bytes_are_caught(self) -> None:
        """A load that flips one bit of one row is named with row and rank."""

        def load(self, ticket) -> None:
            TinyWorker.load(self, ticket)
            if self.rank == 1:
                self.memory[1][ticket.blocks[-1][1]][-1] ^= 1

        error = broken_by(worker=spoilt_worker(load=load))
        assert Rule.CONTENT is error.rule
        assert (1, 1) == (error.ids["rank"], error.ids["row"])

    def test_load_that_does_nothing_is_caught(self) -> None:
        """A load that says it is over and wrote nothing leaves what nobody wrote."""
        error = broken_by(worker=spoilt_worker(load=lambda self, ticket: None))
        assert Rule.CONTENT is error.rule
        assert "nothing was written" in str(error)

    def test_load_that_comes_late_is_caught(self) -> None:
        """A load within the step that starts only after it is seen by that step."""

        class Worker(TinyWorker):
            def wait_for_save(self) -> None:
                for _, load in self.loads:
                    self.load(load)
                self.loads.clear()
                super().wait_for_save()

        error = broken_by(worker=Worker, in_step=True)
        assert Rule.CONTENT is error.rule

    def test_null_block_is_left_alone(self) -> None:
        """H-11: the null block stands for no block; nobody writes to it."""

        def load(self, ticket) -> None:
            TinyWorker.load(self, ticket)
            self.memory[0][0] = 1

        error = broken_by(worker=spoilt_worker(load=load))
        assert Rule.NULL_BLOCK is error.rule


def matches(answer):
    """Return a side whose every match is *answer*, of the number of tokens."""
    return spoilt_scheduler(
        get_num_new_matched_tokens=lambda self, request, computed: answer(
            request.num_tokens
        )
    )


class TestAnswers:
    @pytest.mark.parametrize(
        ("rule", "answer"),
        [
            (Rule.ASYNC_NOTHING, lambda tokens: (0, True)),
            (Rule.MATCH_TOO_LONG, lambda tokens: (tokens + 1, True)),
            (Rule.MATCH_TOO_LONG, lambda tokens: (tokens, False)),
            (Rule.MATCH_UNALIGNED, lambda tokens: (1, True)),
            (Rule.ANSWER, lambda tokens: (-4, True)),
            (Rule.ANSWER, lambda tokens: (4.0, True)),
            (Rule.ANSWER, lambda tokens: 4),
            (Rule.ANSWER, lambda tokens: None),
        ],
    )
    def test_wrong_match_is_caught(self, rule, answer) -> None:
        """H-08, H-11: a match has its form, its end and its limits."""
        assert rule is broken_by(matches(answer)).rule

    def test_match_that_is_not_known_yet_is_asked_again(self) -> None:
        """S3-07: None lets the request wait and is asked for again."""

        def match(self, request, computed):
            self.numbers += 1
            if self.numbers % 3:
                return None, False
            return TinyScheduler.get_num_new_matched_tokens(self, request, computed)

        scheduler = spoilt_scheduler(get_num_new_matched_tokens=match)
        host = tiny_host(ONE_FULL, scheduler)
        run(host, 500)
        assert 0 < host.seen["asked_later"]
        assert 0 < host.seen["load"]

    @pytest.mark.parametrize("answer", [True, (True,), (1, None), (False, "x")])
    def test_wrong_end_is_caught(self, answer) -> None:
        """S3-02: request_finished answers with a truth and a mapping or none."""
        scheduler = spoilt_scheduler(
            request_finished_all_groups=lambda self, request, blocks: answer
        )
        assert Rule.ANSWER is broken_by(scheduler).rule

    def test_end_that_changes_is_caught(self) -> None:
        """S1-02: a request that finished is kept or not, however often one asks."""

        def finished(self, request, blocks):
            self.numbers += 1
            return self.numbers % 2 == 0, None

        error = broken_by(
            spoilt_scheduler(request_finished_all_groups=finished),
            settings=HostSettings(odds=Odds(repeat=1.0)),
        )
        assert Rule.FINISHED_CHANGED is error.rule

    def test_kept_without_blocks_is_caught(self) -> None:
        """S1-28: a request that was aborted before it ran is not kept."""

        def finished(self, request, blocks):
            return not any(blocks), None

        error = broken_by(spoilt_scheduler(request_finished_all_groups=finished))
        assert Rule.DEFERRED_FOR_NOTHING is error.rule

    def test_delivery_may_not_be_required(self) -> None:
        """H-04: a cache never asks for a request to be repeated."""
        scheduler = spoilt_scheduler(requires_kv_delivery=True)
        assert Rule.DELIVERY_REQUIRED is broken_by(scheduler).rule


def plans(change):
    """Return a side whose plan is changed."""

    def plan(self, output):
        return change(output, TinyScheduler.build_connector_meta(self, output))

    return spoilt_scheduler(build_connector_meta=plan)


@attrs.frozen(eq=False)
class NotEqual:
    """Metadata that is another one once it was sent."""


class TestMessages:
    @pytest.mark.parametrize("change", [lambda plan: None, lambda plan: NotEqual()])
    def test_metadata_must_survive(self, change) -> None:
        """H-12: metadata is there, and equal behind the pickle of the engine."""
        error = broken_by(plans(lambda output, plan: change(plan)))
        assert Rule.METADATA_CHANGED is error.rule

    def test_metadata_must_be_small(self) -> None:
        """H-12: per-token data in the metadata is seen."""

        def change(output, plan: Plan) -> Plan:
            return attrs.evolve(plan, padding=bytes(1 << 17))

        assert Rule.METADATA_TOO_LARGE is broken_by(plans(change)).rule

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda output: output.finished_req_ids.clear(),
            lambda output: output.num_scheduled_tokens.popitem(),
            lambda output: output.scheduled_new_reqs[0].block_ids[0].append(3),
            lambda output: setattr(output, "has_sync_kv_loads", True),
        ],
    )
    def test_scheduler_output_is_not_ours(self, spoil) -> None:
        """S3-06: a plan that changes what it was made from is caught."""

        def change(output, plan):
            if output.finished_req_ids and output.scheduled_new_reqs:
                spoil(output)
            return plan

        assert Rule.MUTATED is broken_by(plans(change)).rule

    @pytest.mark.parametrize(
        "hook", ["get_num_new_matched_tokens", "update_state_after_alloc"]
    )
    def test_requests_are_not_ours(self, hook) -> None:
        """S3-06: a hook that changes a request is caught."""

        def spoil(self, request, *args):
            request.num_computed_tokens += 1
            return getattr(TinyScheduler, hook)(self, request, *args)

        assert Rule.MUTATED is broken_by(spoilt_scheduler(**{hook: spoil})).rule


class TestChoices:
    def test_every_rule_but_that_of_traces_is_broken_here(self) -> None:
        """A rule that is added without a connector that breaks it is noticed."""
        text = Path(__file__).read_text(encoding="utf-8")
        unbroken = {rule for rule in Rule if f"Rule.{rule.name} " not in text}
        told = {rule for rule in unbroken if f"Rule.{rule.name}," not in text}
        assert {Rule.HOOK_ORDER} == told
