# SPDX-License-Identifier: Apache-2.0
"""Mutants of a tier of several servers of which one is away, and of whom they are reached by."""

from tests.mutations.mutant import Mutant

__all__ = ["SERVERS"]

_SERVERS = "ucm/backends/_redis_servers.py"
_ANSWERS = "ucm/backends/_redis_answers.py"
_REDIS = "ucm/backends/redis.py"
_WRAP = "ucm/backends/wrap.py"
_AWAY = "tests/backends/test_redis_away.py"
_BACK = f"{_AWAY}::test_server_that_is_away_costs_a_few_calls_and_comes_back"
_TIER = f"{_AWAY}::test_tier_of_which_a_server_is_away_is_no_silent_tier"
_MOVED = f"{_AWAY}::test_what_a_server_had_that_is_away_is_asked_of_whose_it_is"
_SMALL = f"{_AWAY}::test_server_that_answers_small_questions_alone_is_tried_by_one_call"
_NAMES = f"{_AWAY}::test_server_that_names_one_who_is_away_is_not"
_LESS = f"{_AWAY}::test_server_that_stays_away_is_looked_for_ever_less_often"
_ADVICE = "tests/backends/test_redis_advice.py"
_DIALER = "tests/backends/test_redis_dialer.py"
_READ = "tests/backends/test_redis_link.py"
_DOWN = "tests/backends/test_redis_down.py"
_CIRCUIT = "tests/backends/test_circuit.py"
_NODE = (
    "tests/agent/test_node.py::TestMain::test_server_of_a_tier_that_is_away_is_named"
)

SERVERS = (
    Mutant(
        name="server_that_is_away_is_asked",
        why="R-52: it costs each call a deadline, also those that ask others as well.",
        file=_SERVERS,
        find="        if circuit.is_open and not server.is_found:\n",
        replace="        if False:\n",
        killers=(_BACK,),
    ),
    Mutant(
        name="call_waits_for_who_is_away",
        why="R-52: once in a while what others have comes with the deadline of the one that is away.",
        file=_SERVERS,
        find="        if self._tasks is None:  # nobody attends to it\n",
        replace="        if True:\n",
        killers=(_BACK,),
    ),
    Mutant(
        name="each_call_looks_for_who_is_away",
        why="R-63: a node full of requests falls upon a server that comes back.",
        file=_SERVERS,
        find="circuit.wait_s <= 0 and not server.is_looked_for",
        replace="circuit.wait_s <= 0",
        killers=(_BACK,),
    ),
    Mutant(
        name="who_is_away_is_looked_for_at_once",
        why="R-52: looks for a server that is gone are as many as the calls.",
        file=_SERVERS,
        find="circuit.wait_s <= 0 and not server.is_looked_for",
        replace="not server.is_looked_for",
        killers=(_BACK,),
    ),
    Mutant(
        name="who_is_away_is_never_found",
        why="R-63: what a server has that was restarted is computed until the agent is started anew.",
        file=_SERVERS,
        find="server.is_found = self._server_of(command) is server",
        replace="pass",
        killers=(_BACK,),
    ),
    Mutant(
        name="look_that_fails_is_none",
        why="R-52: who is away for an hour is looked for as often as at first.",
        file=_SERVERS,
        find="                    server.circuit.judge(is_bad=True)\n",
        replace="                    pass\n",
        killers=(_LESS,),
    ),
    Mutant(
        name="who_stands_in_speaks_for_who_is_away",
        why="R-52: a slot that moved has the rest of a dead server's be asked of it again.",
        file=_SERVERS,
        find="server.is_found = self._server_of(command) is server",
        replace="server.is_found = True",
        killers=(_MOVED,),
    ),
    Mutant(
        name="found_once_is_found_for_ever",
        why="R-52: who is away again is tried by calls, which wait for it, before anybody looks.",
        file=_SERVERS,
        find="        server.is_found = False  # one call tries\n",
        replace="",
        killers=(_SMALL,),
    ),
    Mutant(
        name="others_are_blamed_for_who_is_away",
        why="X-14: a tier of six servers is gone with the first of them.",
        file=_SERVERS,
        find="                told[at] = AWAY\n",
        replace="                pass\n",
        killers=(_TIER,),
    ),
    Mutant(
        name="tier_that_is_all_away_is_no_silent_one",
        why="X-14: it costs each call a deadline, and nobody is told.",
        file=_SERVERS,
        find="lambda one: not one.is_well(for_writes=are_writes)",
        replace="lambda one: False",
        killers=(_TIER,),
    ),
    Mutant(
        name="server_that_is_back_is_not_enough",
        why="X-14: a tier of which one server is back is not asked for another while, the longest by then.",
        file=_SERVERS,
        find="        if lost and not self._are_all(",
        replace="        if spares and lost and not self._are_all(",
        killers=(
            "tests/backends/test_redis_servers.py::test_server_that_is_back_is_enough_for_a_tier_that_was_all_away",
        ),
    ),
    Mutant(
        name="server_that_loads_is_a_tier_without_an_answer",
        why="X-14: a tier of six servers is gone until one of them that was restarted has read its file.",
        file=_ANSWERS,
        find='return str(answer).startswith("LOADING")',
        replace="return False",
        killers=(
            "tests/backends/test_redis_servers.py::test_server_that_loads_its_data_is_away",
        ),
    ),
    Mutant(
        name="tier_that_is_all_away_is_spared",
        why="R-63: the one call that tries asks nobody, and the next while is longer.",
        file=_SERVERS,
        find="        server.circuit.judge(is_bad=are_silent(answers))\n",
        replace="",
        killers=(_TIER,),
    ),
    Mutant(
        name="who_names_another_is_silent",
        why="X-14: servers that say whose a block is are not asked, as that one is away.",
        file=_SERVERS,
        find="            if not (is_silence(answer) and isinstance(answers[at], ResponseError)):",
        replace="            if True:",
        killers=(_NAMES,),
    ),
    Mutant(
        name="cluster_that_refuses_credentials_is_down",
        why="A wrong password of a cluster is a tier that has nothing, for ever, and nobody is told why.",
        file="ucm/backends/_redis_answers.py",
        find="        exc = exc.__cause__ or exc.__context__",
        replace="        exc = None",
        killers=(
            "tests/backends/test_redis_cluster.py::test_cluster_that_refuses_credentials_is_no_server_that_is_down",
        ),
    ),
    Mutant(
        name="option_of_an_address_is_found_out_later",
        why="A tier whose address has an option that there is not has nothing, and nobody is told why.",
        file="ucm/backends/redis.py",
        find="                Dialer(read.url, limit).to_one()\n",
        replace="                pass\n",
        killers=(
            "tests/backends/test_redis.py::TestServer::test_wrong_setting_is_named",
        ),
    ),
    Mutant(
        name="call_of_who_is_away_is_a_good_one",
        why="X-14: a circuit is closed by calls that asked nobody.",
        file=_WRAP,
        find="return None if is_vain else False",
        replace="return False",
        killers=(f"{_CIRCUIT}::test_call_of_those_who_are_away_is_no_try",),
    ),
    Mutant(
        name="word_for_away_reaches_callers",
        why="R-51: nobody above a breaker knows it, and blocks of it are dropped as broken.",
        file=_WRAP,
        find="        if away in told:\n",
        replace="        if not told:\n",
        killers=(f"{_CIRCUIT}::test_servers_that_are_away_open_no_circuit",),
    ),
    Mutant(
        name="last_call_of_a_circuit_is_forgotten",
        why="X-14: a tier that falls silent as a whole is found out twice as late.",
        file="ucm/backends/_circuit.py",
        find="return not self.is_open and not (self._bad and self._bad[-1])",
        replace="return not self.is_open",
        killers=(_TIER,),
    ),
    Mutant(
        name="nobody_attends_to_tiers",
        why="R-52: once in a while a call waits for the server that is away.",
        file="ucm/agent/node.py",
        find="                    self._tasks.start_soon(tier.attend)\n",
        replace="                    pass\n",
        killers=(_NODE,),
    ),
    Mutant(
        name="ends_that_are_away_drop_what_is_between",
        why="R-55: blocks for servers that are well are dropped for the one that is not.",
        file="ucm/agent/looking.py",
        find=" and not is_one_away:",
        replace=":",
        killers=(
            "tests/agent/test_looking.py::TestLookBeforePut::test_server_of_several_that_is_away_says_nothing_of_others",
        ),
    ),
    Mutant(
        name="who_is_away_has_all_turns_of_the_loop",
        why="R-63: an agent whose tier is not served stands still over a block of a server that is away.",
        file="ucm/agent/spill.py",
        find="                is_vain = not self._again.keys().isdisjoint(sizes)\n",
        replace="",
        killers=(
            "tests/agent/test_spill_again.py::test_block_whose_server_is_away_has_no_turn_of_all_others",
        ),
    ),
    Mutant(
        name="settings_of_one_server_asked",
        why="A cluster's other server refuses what it is asked, and nobody was warned.",
        file=_SERVERS,
        find="self._client.get_primaries() if self.is_cluster else [self._client]",
        replace="self._client.get_primaries()[:1] if self.is_cluster else [self._client]",
        killers=(f"{_ADVICE}::test_servers_of_a_cluster_are_asked_each",),
    ),
    Mutant(
        name="blocks_that_may_not_go_are_fine",
        why="A tier takes nothing new from some day on, and nobody was warned.",
        file="ucm/backends/_redis_advice.py",
        find='policy.startswith("volatile") and not ttl',
        replace="False",
        killers=(
            f"{_ADVICE}::test_each_setting_that_loses_blocks_or_a_machine_is_named[config6-0-named6]",
        ),
    ),
    Mutant(
        name="advice_told_to_nobody",
        why="What loses blocks one day is found by that day.",
        file="ucm/doctor/tiers.py",
        find="    if advice:\n",
        replace="    if False:\n",
        killers=(
            "tests/doctor/test_tiers.py::test_what_the_other_side_should_be_set_to_is_told",
        ),
    ),
    Mutant(
        name="address_in_capitals_is_none",
        why="R-52: what redis-py's client takes ends an agent as it opens its tiers.",
        file="ucm/backends/_redis_dialer.py",
        find="dict(on_loop.parse_url(url))",
        replace="dict(__import__('redis').connection.parse_url(url))",
        killers=(f"{_DIALER}::test_address_in_capitals_opens_a_tier",),
    ),
    Mutant(
        name="connection_of_another_kind",
        why="R-52: an address for TLS is asked in the open.",
        file="ucm/backends/_redis_dialer.py",
        find="_BLOCKING.get(kind, Connection)",
        replace="Connection",
        killers=(f"{_DIALER}::test_connection_is_where_the_one_on_the_loop_is",),
    ),
    Mutant(
        name="thread_left_by_each_call",
        why="R-52: a name that is looked up for minutes costs a thread with each call.",
        file="ucm/backends/_redis_link.py",
        find="            undo.callback(self._left.append, link)\n",
        replace="",
        killers=(f"{_READ}::test_connections_that_nobody_waits_for_are_few",),
    ),
    Mutant(
        name="thread_that_has_ended_is_counted",
        why="R-52: a server whose name nobody knew for a while is never asked again.",
        file="ucm/backends/_redis_link.py",
        find="[link for link in self._left if link.is_left]",
        replace="list(self._left)",
        killers=(f"{_READ}::test_connections_that_nobody_waits_for_are_few",),
    ),
    Mutant(
        name="all_are_asked_for_with_each_that_is_not_there",
        why="R-52: a request for many blocks that are gone takes longer than it has.",
        file="ucm/backends/_redis_link.py",
        find="most = max(_FEW, 2 * (len(answers.told) - before))",
        replace="pass",
        killers=(
            f"{_READ}::test_values_that_are_not_there_cost_no_more_the_more_are_asked_for",
        ),
    ),
    Mutant(
        name="headers_of_a_full_request_have_a_timeout_of_their_own",
        why="R-52: an agent ends its call before a server that is silent is given up.",
        file="ucm/backends/_redis_link.py",
        find="round(nbytes / _TIMED_BYTES)",
        replace="-(-nbytes // _TIMED_BYTES)",
        killers=(f"{_READ}::test_request_has_time_for_what_it_moves",),
    ),
    Mutant(
        name="slots_that_nobody_has_are_the_tiers_fault",
        why="R-63: some slots without a server stop a tier that has all others.",
        file=_SERVERS,
        find="if is_unserved(told[at])]",
        replace="if False]",
        killers=(f"{_DOWN}::test_slots_that_nobody_has_cost_their_own_blocks_alone",),
    ),
    Mutant(
        name="cluster_without_slots_is_well",
        why="R-63: a tier that has nothing, and takes nothing, is asked for ever.",
        file=_SERVERS,
        find="self.circuit.is_well and self.serves",
        replace="self.circuit.is_well",
        killers=(f"{_DOWN}::test_cluster_without_any_slots_is_a_silent_tier",),
    ),
    Mutant(
        name="no_thread_is_a_bug",
        why="R-52: an agent ends, with all its tiers, where its machine starts no more threads.",
        file="ucm/backends/_redis_link.py",
        find="        except RuntimeError as exc:\n",
        replace="        except KeyError as exc:\n",
        killers=(f"{_READ}::test_connection_without_a_thread_is_none",),
    ),
    Mutant(
        name="attending_that_raised_is_over",
        why="A server that is away is looked for no more.",
        file=_WRAP,
        find="        while not is_over:\n",
        replace="        if not is_over:\n",
        killers=(
            "tests/backends/test_wrap_bugs.py::test_backend_whose_attending_raises_is_attended_to_again",
        ),
    ),
)
