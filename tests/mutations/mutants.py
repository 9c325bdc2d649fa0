# SPDX-License-Identifier: Apache-2.0
"""All mutants, and what one is."""

from pathlib import Path

from tests.mutations.mutant import Mutant, StaleError
from tests.mutations.of_agent import AGENT
from tests.mutations.of_arena import ARENA
from tests.mutations.of_backends import BACKENDS
from tests.mutations.of_below import BELOW
from tests.mutations.of_bench import BENCH
from tests.mutations.of_cb import CB
from tests.mutations.of_chat import CHAT
from tests.mutations.of_company import COMPANY
from tests.mutations.of_cost import COST
from tests.mutations.of_cut import CUT
from tests.mutations.of_decisions import DECISIONS
from tests.mutations.of_devices import DEVICES
from tests.mutations.of_digests import DIGESTS
from tests.mutations.of_doctor import DOCTOR
from tests.mutations.of_doors import DOORS
from tests.mutations.of_down import DOWN
from tests.mutations.of_drivers import DRIVERS
from tests.mutations.of_ends import ENDS
from tests.mutations.of_eng import ENG
from tests.mutations.of_engines import ENGINES
from tests.mutations.of_events import EVENTS
from tests.mutations.of_failing import FAILING
from tests.mutations.of_fairness import FAIRNESS
from tests.mutations.of_fast import FAST
from tests.mutations.of_faults import FAULTS
from tests.mutations.of_foreign import FOREIGN
from tests.mutations.of_forget import FORGET
from tests.mutations.of_gpu import GPU
from tests.mutations.of_hit import HIT
from tests.mutations.of_host import HOST
from tests.mutations.of_hosts import HOSTS
from tests.mutations.of_index import INDEX
from tests.mutations.of_interrupts import INTERRUPTS
from tests.mutations.of_keys import KEYS
from tests.mutations.of_kills import KILLS
from tests.mutations.of_kv_events import KV_EVENTS
from tests.mutations.of_lanes import LANES
from tests.mutations.of_lease import LEASE
from tests.mutations.of_lib import LIB
from tests.mutations.of_light import LIGHT
from tests.mutations.of_limits import LIMITS
from tests.mutations.of_load import LOAD
from tests.mutations.of_looks import LOOKS
from tests.mutations.of_match import MATCH
from tests.mutations.of_metrics import METRICS
from tests.mutations.of_modes import MODES
from tests.mutations.of_mooncake import MOONCAKE
from tests.mutations.of_nodes import NODES
from tests.mutations.of_numbers import NUMBERS
from tests.mutations.of_own import OWN
from tests.mutations.of_packed import PACKED
from tests.mutations.of_pinning import PINNING
from tests.mutations.of_pipe import PIPE
from tests.mutations.of_poller import POLLER
from tests.mutations.of_proofs import PROOFS
from tests.mutations.of_quick import QUICK
from tests.mutations.of_refusing import REFUSING
from tests.mutations.of_releases import RELEASES
from tests.mutations.of_replay import REPLAY
from tests.mutations.of_requests import REQUESTS
from tests.mutations.of_rest import REST
from tests.mutations.of_rows import ROWS
from tests.mutations.of_runner import RUNNER
from tests.mutations.of_sched import SCHED
from tests.mutations.of_selection import SELECTION
from tests.mutations.of_servers import SERVERS
from tests.mutations.of_sglang import SGLANG
from tests.mutations.of_shares import SHARES
from tests.mutations.of_sharing import SHARING
from tests.mutations.of_shelf import SHELF
from tests.mutations.of_short import SHORT
from tests.mutations.of_signs import SIGNS
from tests.mutations.of_slab import SLAB
from tests.mutations.of_staged import STAGED
from tests.mutations.of_states import STATES
from tests.mutations.of_stores import STORES
from tests.mutations.of_story import STORY
from tests.mutations.of_stuck import STUCK
from tests.mutations.of_suites import SUITES
from tests.mutations.of_ticket import TICKET
from tests.mutations.of_tier import TIER
from tests.mutations.of_tiers import TIERS
from tests.mutations.of_topology import TOPOLOGY
from tests.mutations.of_trace import TRACE
from tests.mutations.of_transport import TRANSPORT
from tests.mutations.of_uses import USES
from tests.mutations.of_visits import VISITS
from tests.mutations.of_warm import WARM
from tests.mutations.of_ways import WAYS
from tests.mutations.of_weights import WEIGHTS
from tests.mutations.of_why import WHY
from tests.mutations.of_worker import WORKER
from tests.mutations.of_writing import WRITING
from tests.mutations.of_yuan import YUAN

__all__ = ["MUTANTS", "ROOT", "Mutant", "StaleError"]

ROOT = Path(__file__).parents[2]
MUTANTS: tuple[Mutant, ...] = (
    *AGENT,
    *TIER,
    *TIERS,
    *ARENA,
    *BACKENDS,
    *BENCH,
    *CB,
    *CHAT,
    *DECISIONS,
    *DOCTOR,
    *STAGED,
    *STATES,
    *STORES,
    *STORY,
    *SGLANG,
    *SHARES,
    *SHARING,
    *SHELF,
    *SHORT,
    *PROOFS,
    *SIGNS,
    *SLAB,
    *INDEX,
    *FAST,
    *FAILING,
    *SELECTION,
    *SERVERS,
    *REFUSING,
    *DOWN,
    *REQUESTS,
    *EVENTS,
    *POLLER,
    *DEVICES,
    *DIGESTS,
    *DRIVERS,
    *TRANSPORT,
    *TRACE,
    *LANES,
    *ROWS,
    *DOORS,
    *MODES,
    *TOPOLOGY,
    *ENGINES,
    *RELEASES,
    *MOONCAKE,
    *YUAN,
    *NODES,
    *NUMBERS,
    *WEIGHTS,
    *KEYS,
    *KV_EVENTS,
    *RUNNER,
    *STUCK,
    *SCHED,
    *USES,
    *WHY,
    *WRITING,
    *WARM,
    *WAYS,
    *BELOW,
    *ENDS,
    *ENG,
    *PINNING,
    *PIPE,
    *WORKER,
    *LIGHT,
    *LIMITS,
    *LIB,
    *HOST,
    *INTERRUPTS,
    *MATCH,
    *LOAD,
    *LOOKS,
    *TICKET,
    *LEASE,
    *REPLAY,
    *GPU,
    *FOREIGN,
    *FORGET,
    *HIT,
    *HOSTS,
    *OWN,
    *PACKED,
    *QUICK,
    *METRICS,
    *COMPANY,
    *COST,
    *CUT,
    *KILLS,
    *FAULTS,
    *FAIRNESS,
    *REST,
    *SUITES,
    *VISITS,
)
