# SPDX-License-Identifier: Apache-2.0
"""Mutants of a tier of several servers of which one takes nothing, and of what is told of servers."""

from tests.mutations.mutant import Mutant

__all__ = ["REFUSING"]

_SERVERS = "ucm/backends/_redis_servers.py"
_ANSWERS = "ucm/backends/_redis_answers.py"
_REDIS = "ucm/backends/redis.py"
_TROUBLES = "ucm/agent/troubles.py"
_HEALTH = "ucm/agent/health.py"
_TOP = "ucm/cli/top_view.py"
_TESTS = "tests/backends/test_redis_refusing.py"
_COSTS = f"{_TESTS}::test_server_that_takes_nothing_costs_its_own_blocks_alone"
_NONE = (
    f"{_TESTS}::test_tier_of_which_no_server_takes_anything_is_asked_to_take_nothing"
)
_MIXED = f"{_TESTS}::test_server_that_takes_nothing_while_the_other_is_away_is_a_tier_that_takes_nothing"
_FULL = f"{_TESTS}::test_server_that_is_full_is_full_each_time"
_SAYS = "tests/backends/test_redis_answers.py::test_server_takes_nothing_that_says_so_to_a_write"
_TOLD = "tests/agent/test_troubles.py::test_server_is_told_of_once_for_all_that_becomes_of_it"
_BOUND = "tests/agent/test_troubles.py::test_servers_of_a_large_cluster_are_named_up_to_a_bound"
_GAUGE = "tests/agent/test_health.py::TestRefresh::test_server_of_a_tier_that_is_away_or_takes_nothing_is_named"
_NAMES = "tests/agent/test_health.py::TestRefresh::test_names_of_servers_are_bounded_over_all_time"
_SHOWN = "tests/cli/test_top.py::TestScreen::test_servers_of_tiers_that_are_away_or_take_nothing_are_told"

REFUSING = (
    Mutant(
        name="server_that_takes_nothing_is_sent_all",
        why="R-52: megabytes go to a server whose disk is full, to be refused, for hours.",
        file=_SERVERS,
        find="    if spares:\n        return await server.writes",
        replace="    if False:\n        return await server.writes",
        killers=(f"{_COSTS}[noreplicas]",),
    ),
    Mutant(
        name="tier_is_blamed_for_who_takes_nothing",
        why="X-14: a tier of six servers takes nothing while the snapshot of one of them fails.",
        file=_SERVERS,
        find="is_silence(told[at]) or (are_writes and is_refusal(told[at]))",
        replace="is_silence(told[at])",
        killers=(f"{_COSTS}[misconf]",),
    ),
    Mutant(
        name="who_takes_nothing_is_tried_ever_later",
        why="R-63: a server that takes blocks again gets none for half a minute.",
        file=_SERVERS,
        find="        self.writes = Circuit(clock, longest_pause_s=_LONGEST_S)",
        replace="        self.writes = Circuit(clock)",
        killers=(f"{_COSTS}[noreplicas]",),
    ),
    Mutant(
        name="reads_say_that_a_server_takes",
        why="R-52: it is sent blocks again whenever somebody reads.",
        file=_SERVERS,
        find="            if server is not None and are_writes:",
        replace="            if server is not None:",
        killers=(f"{_COSTS}[noreplicas]",),
    ),
    Mutant(
        name="who_takes_nothing_is_told_to_forget",
        why="R-52: a server that refuses is asked for each of the blocks that are to be forgotten.",
        file=_REDIS,
        find="self._servers.ask([*heads, *parts], are_writes=True)",
        replace="self._servers.ask([*heads, *parts])",
        killers=(f"{_COSTS}[noreplicas]",),
    ),
    Mutant(
        name="tier_that_takes_nothing_is_a_well_one",
        why="X-14: nobody is told that no server takes anything, and the backlog is dropped.",
        file=_SERVERS,
        find="(self.writes.is_well or not for_writes)",
        replace="True",
        killers=(_NONE,),
    ),
    Mutant(
        name="tier_that_takes_nothing_is_spared",
        why="R-63: the one put that tries asks nobody, and the next while is longer.",
        file=_SERVERS,
        find="        spares_writes = are_writes and not self._are_all(_takes_nothing)",
        replace="        spares_writes = are_writes",
        killers=(_NONE,),
    ),
    Mutant(
        name="who_is_away_would_take_blocks",
        why="R-63: where one is away and the other takes nothing, the one put that tries asks neither.",
        file=_SERVERS,
        find="        return self.is_away or self.writes.is_open",
        replace="        return self.writes.is_open",
        killers=(_MIXED,),
    ),
    Mutant(
        name="who_is_away_is_told_to_take_nothing",
        why="R-52: an operator looks at the disk of a machine that is gone.",
        file=_SERVERS,
        find=" if one.takes_nothing and not one.is_away]",
        replace=" if one.takes_nothing]",
        killers=(_MIXED,),
    ),
    Mutant(
        name="full_server_is_asked_no_more",
        why="R-55: a server that is full is said to be broken, and keeps what was to be forgotten.",
        file=_ANSWERS,
        find="is_silence(answer) or is_full(answer) or",
        replace="is_silence(answer) or",
        killers=(_FULL,),
    ),
    Mutant(
        name="who_names_another_takes_nothing",
        why="X-14: servers get nothing for a while whenever slots move.",
        file=_ANSWERS,
        find=" or is_elsewhere(answer))",
        replace=")",
        killers=(_SAYS,),
    ),
    Mutant(
        name="who_names_another_to_redis_py_takes_nothing",
        why="X-14: servers get nothing for a while whenever slots move.",
        file=_ANSWERS,
        find=" or isinstance(answer, _ELSEWHERE):",
        replace=":",
        killers=(_SAYS,),
    ),
    Mutant(
        name="silence_says_that_a_server_takes",
        why="X-14: one that refuses and is silent in turn is sent all blocks.",
        file=_ANSWERS,
        find="    return None if len(failed) == len(answers) else False",
        replace="    return False",
        killers=(_SAYS,),
    ),
    Mutant(
        name="server_that_goes_is_told_to_take",
        why="R-52: the log says that a server takes blocks again at the moment when it dies.",
        file=_TROUBLES,
        find='            if was is not None and what != "":',
        replace="            if was is not None:",
        killers=(_TOLD,),
    ),
    Mutant(
        name="log_does_not_say_what_a_server_does_not",
        why="R-52: one that takes no blocks is looked for as if it were down.",
        file=_TROUBLES,
        find='    return {"direction": word} if word else {}',
        replace="    return {}",
        killers=(_TOLD,),
    ),
    Mutant(
        name="log_names_a_server_all_the_time",
        why="R-52: twice a second, for as long as it is away.",
        file=_TROUBLES,
        find="        self._told = now\n",
        replace="",
        killers=(_TOLD,),
    ),
    Mutant(
        name="log_names_all_servers_of_a_cluster",
        why="R-52: a network that is cut is hundreds of lines.",
        file=_TROUBLES,
        find="for name in tier.away[:_MOST_NAMED]}",
        replace="for name in tier.away}",
        killers=(_BOUND,),
    ),
    Mutant(
        name="status_names_all_servers_of_a_cluster",
        why="R-52: what an engine asks for each second has no bound.",
        file=_TROUBLES,
        find='"refusing": list(tier.refusing[:_MOST_NAMED]),',
        replace='"refusing": list(tier.refusing),',
        killers=(_BOUND,),
    ),
    Mutant(
        name="gauge_of_a_server_stays_down",
        why="R-52: a server that is back looks as if it were away until the engine ends.",
        file=_HEALTH,
        find="                is_up = int(server not in are_bad)",
        replace="                is_up = 0",
        killers=(_GAUGE,),
    ),
    Mutant(
        name="parts_of_a_block_lie_with_several_servers",
        why="R-55: one of two that is away costs nearly all blocks of more than a megabyte.",
        file="ucm/backends/_redis_values.py",
        find='if is_cluster else b""',
        replace='if not key else b""',
        killers=(
            f"{_TESTS}::test_server_that_takes_nothing_costs_no_large_block_of_another",
        ),
    ),
    Mutant(
        name="server_that_is_away_takes_blocks",
        why="R-52: who watches what is saved sees nothing of a server that is gone.",
        file=_HEALTH,
        find='("save", away | refusing)',
        replace='("save", refusing)',
        killers=(_GAUGE,),
    ),
    Mutant(
        name="gauges_of_servers_without_end",
        why="R-52: a cluster in containers has a new series with each of their addresses.",
        file=_HEALTH,
        find="len(self._servers) >= _MOST_SERVERS",
        replace="False",
        killers=(_NAMES,),
    ),
    Mutant(
        name="servers_without_a_name_are_well",
        why="R-52: of a cluster that is mostly away a few servers are seen.",
        file=_HEALTH,
        find="(*names, *[_OTHERS] * (count > len(names)))",
        replace="names",
        killers=(_NAMES,),
    ),
    Mutant(
        name="long_name_of_a_server_cut_wrongly",
        why="R-52: what follows a server's name in a gauge's text is taken for another label.",
        file=_HEALTH,
        find='name.replace("|", "_")[-_LONGEST_NAME:]',
        replace="name[:_LONGEST_NAME]",
        killers=(_NAMES,),
    ),
    Mutant(
        name="servers_that_are_away_not_shown",
        why="R-71: who looks at a slow engine does not see which server of its tier is gone.",
        file=_TOP,
        find="        told += _servers_text(self.gauges)\n",
        replace="",
        killers=(_SHOWN,),
    ),
    Mutant(
        name="hundreds_of_servers_shown",
        why="R-71: an engine's line fills the terminal.",
        file=_TOP,
        find="[*names[:_MOST_SERVERS], *rest]",
        replace="names",
        killers=(_SHOWN,),
    ),
    Mutant(
        name="agent_tells_nobody_of_servers",
        why="R-52: which server of a cluster takes nothing is in nobody's log.",
        file="ucm/agent/node.py",
        find="            self._servers.look(self._tiers)\n",
        replace="",
        killers=(
            "tests/agent/test_node.py::TestMain::test_server_of_a_tier_that_is_away_is_named",
        ),
    ),
    Mutant(
        name="wrapper_hides_who_takes_nothing",
        why="R-52: a tier stands behind several wrappers, and its servers are told of by none.",
        file="ucm/backends/wrap.py",
        find="        return self.inner.refusing\n",
        replace="        return ()\n",
        killers=(
            "tests/backends/test_wrap.py::TestShape::test_wrapper_forwards_arguments_and_answer[refusing-wrapper]",
        ),
    ),
    Mutant(
        name="address_told_with_its_password",
        why="A mistyped address stands in logs with the password of a store of all prompts.",
        file="ucm/backends/_address.py",
        find='"..." if "@" in str(value) else value',
        replace="value",
        killers=(
            "tests/backends/test_redis.py::TestServer::test_wrong_setting_is_named[settings9-url]",
            "tests/backends/test_object.py::TestService::test_wrong_setting_is_named[settings9-url]",
        ),
    ),
    Mutant(
        name="cluster_that_gives_nobody_up",
        why="R-52: each call of an agent with a shorter deadline is ended before a silent server is found out.",
        file=_SERVERS,
        find="        return self._timeout if self.is_cluster else 0.0",
        replace="        return 0.0",
        killers=(
            "tests/agent/test_node.py::TestMain::test_tier_that_would_be_ended_before_it_gives_up_is_one_line",
        ),
    ),
    Mutant(
        name="engine_without_us_called_well",
        why="C.5: an engine that was told of no connector serves without ucm, and nobody says so.",
        file="ucm/doctor/engine.py",
        find="    if _NAME not in transfer:\n",
        replace="    if False:\n",
        killers=(
            "tests/doctor/test_engine.py::test_connector_that_an_engine_does_not_find_is_found",
        ),
    ),
    Mutant(
        name="module_unlooked_for",
        why="An engine whose connector's module is not there is called well, and does not start.",
        file="ucm/doctor/engine.py",
        find="    if module is not None and not _is_there(str(module)):\n",
        replace="    if False:\n",
        killers=(
            "tests/doctor/test_engine.py::test_connector_that_an_engine_does_not_find_is_found",
        ),
    ),
)
