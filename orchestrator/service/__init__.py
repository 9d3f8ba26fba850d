"""The service: one process, one event loop, one run from start to finish.

                     which env        which task          what runs            rooms that decide are pure:
      trainer ◀───┐  mix ──────────▶ tasks ──────────▶ dispatch                events in, instructions out,
        │         │                                       │ ▲                  time as an argument. `run`
        │ publish │   batches              ended groups   │ │ room, slots      joins them; nothing else does.
        ▼         │                                       ▼ │
   trainer_link ◀─┴─ buffer ◀── sinks ◀── groups ◀── env_servers ◀── ZMQ ──▶ env server processes (envs)
        ▲             (exact batches)     (scoring)                                  │ HTTP
        │ durable first                                                              ▼
      journal        facts ──▶ views (display, metrics, HTTP)    inference ───▶ inference servers

`starting` starts, `service` serves and finishes; `driver` drives the run with asyncio, `wiring` joins shells to it, the
blueprints go from configuration to arguments, `health` watches the process. `evaluate` runs evaluations alone,
`embedded` a run inside somebody's program, `rollouts` single ones; `deep_check` tries everything and starts no run.

Invariants: every dispatched rollout ends as exactly one outcome in the ledger. A batch has exactly the asked size and
every minimum that holds. A batch is offered only when it is on disk, and asking again gives the same bytes; a group is
trained on once. Nothing is trained beyond its staleness. Whatever is waited for has an event or a time that ends it, and
a sentence in the status. Nothing here blocks the loop for more than some milliseconds. No child outlives the process.
"""

from orchestrator.service.service import Service
from orchestrator.service.starting import build_front, start_service

__all__ = ["Service", "build_front", "start_service"]
