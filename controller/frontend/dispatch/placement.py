"""Places requests that lost their workers at the same time on the remaining workers.

    answers lose their workers ── the event-loop iteration ends ──▶ one plan for all ──▶ each is sent to its planned target
                                       └── no target, or the target is no longer possible ──▶ the router decides

A failing worker fails all its requests within one event-loop iteration. If each request were routed separately, short
requests would count as much as long ones. So all failed requests are planned together
(`controller.migration.placement`), in order of priority, then of age. The plan assigns each request to the worker that
would finish the request's prefill first. Each worker first prefills the requests that the plan has already assigned to it.

Each frontend plans only its own requests, and all frontends plan at the same moment, from the same load reports. If
several workers are equally loaded, each frontend starts at a different one (`_share`), to avoid the same choice.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog
import xxhash

from controller.deciders.capacity import tpot_ms
from controller.frontend.dispatch.live_request import LiveRequest, RunningRequests
from controller.frontend.request.state import GenerationRequest, closed_to
from controller.frontend.scheduling.scheduler import Peers, Scheduler
from controller.migration.cost import KvShape, MigrationCost, MigrationTarget, MovingPolicy, estimate
from controller.migration.links import Lane, lanes
from controller.migration.placement import Leaving, Placement, place
from controller.ports import RequestPlane
from controller.router.endpoints import Endpoint

TARGETS_MAX = 64  # targets considered by one plan: planning a thousand requests over them takes 50 ms
# batch fullness is rounded down to quarters, and workers in the same quarter count as equally loaded
LOAD_STEPS = 4
RESIDENCE_S = 5.0  # assumed longest wait in seconds for a slot in a full batch
STEP_S_MAX = 10.0  # a longer step time than this many seconds in a registration is ignored
BLOCKS_UNKNOWN = 10**9  # assumed free KV blocks of a worker if its engine does not report blocks

log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class Placer:
    """Chooses the target workers for answers of one frontend that must continue on another worker."""

    frontend: str
    policy: MovingPolicy
    routing: Scheduler
    plane: RequestPlane
    running: RunningRequests
    peers: Peers

    def place(self, waiting: Collection[LiveRequest]) -> Iterator[tuple[LiveRequest, Endpoint | None]]:
        """Yield each request in `waiting` with its target worker, or with None if the router should choose.

        All these requests lost their workers in one event-loop iteration. The caller must send each request before it
        advances the iterator.
        """
        if len(waiting) == 1:
            yield from ((live, None) for live in waiting)
            return
        parties: dict[object, list[LiveRequest]] = {}
        for live in waiting:
            parties.setdefault((live.request.model, live.request.lineage), []).append(live)
        for party in parties.values():
            try:
                plan = self.plan(party)
            except Exception:  # the requests must be sent even if planning fails
                log.exception("group_not_placed", requests=len(party))
                yield from ((live, None) for live in party)
                continue
            yield from ((live, endpoint) for live, _, endpoint in plan)
            per_target = Counter(placement.target for _, placement, _ in plan if placement.target)
            log.info("group_placed", requests=len(plan), targets=len(per_target),
                     no_room=len(plan) - per_target.total(), most_at_one=max(per_target.values(), default=0))  # fmt: skip

    # --- the plan -----------------------------------------------------------------------------------------

    def plan(
        self,
        generations: Sequence[LiveRequest],
        source: Endpoint | None = None,
        to: str = "",
        without: Collection[str] = (),
    ) -> list[tuple[LiveRequest, Placement, Endpoint | None]]:
        """Return the answers in the order in which to move them, each with placement (method and cost) and target.

        All answers must have the same model and lineage (model revision and tokenizer). An answer moves only to a
        worker that has its adapter. `source` is the current worker of all answers, which may send their KV caches. If
        `source` is None, that worker is lost or not trusted, and every KV cache is recomputed. `to` names the only
        permitted target (empty: any). Targets in `without` are excluded. The target of an answer is None if no worker has
        a free slot.
        """
        endpoints = [
            s
            for s in self._targets([one.request for one in generations])
            if s is not source and to in ("", s.worker) and s.worker not in without
        ]
        # answers move one at a time, so the load of a target includes those that have already moved
        if source is not None:
            endpoints.sort(key=lambda endpoint: (self._in_flight(endpoint) + 1) / max(endpoint.weight, 1e-6))
        kv = _kv_shape(source) if source is not None else None
        found = {endpoint.worker: endpoint for endpoint in endpoints}
        requests = {str(n): generation for n, generation in enumerate(generations)}
        placements = place(
            self.policy,
            kv,
            [self._leaving(name, generation, found) for name, generation in requests.items()],
            [self._target(endpoint, source if kv is not None else None) for endpoint in found.values()],
        )
        return [(requests[p.request_id], p, found.get(p.target)) for p in placements]

    def price(
        self, live: LiveRequest, source: Endpoint, endpoint: Endpoint, *, cached_tokens: int, at_once: int
    ) -> MigrationCost:
        """Return the cost of moving an answer from `source` to `endpoint` while `at_once` transfers share the link.

        The target has reserved a slot and has `cached_tokens` of the answer in its prefix cache. The result
        recommends the method (transfer or re-prefill) that would be cheaper if the link carried no other transfer.
        """
        tokens, cached = live.length, max(0, cached_tokens)
        kv, there = _kv_shape(source), self._target(endpoint, source, newcomers=0)
        alone = estimate(self.policy, kv, there, tokens, cached_tokens=cached)
        cost = estimate(self.policy, kv, there, tokens, cached_tokens=cached, at_once=at_once)
        return replace(cost, recommended=alone.recommended)

    def _leaving(self, name: str, generation: LiveRequest, targets: Mapping[str, Endpoint]) -> Leaving:
        table, state = self.routing.table, generation.state
        tried, adapter = state.tried | closed_to(state), generation.request.adapter
        barred = {key[0] for key in tried if key[0] in targets and targets[key[0]].key == key}
        if adapter:
            barred |= {name for name, endpoint in targets.items() if not endpoint.has(adapter)}
        return Leaving(
            request_id=name,
            priority=table.urgency(generation.request.tier),
            arrived=state.began_at,
            tokens=generation.length,
            barred=barred,
        )

    def _targets(self, requests: Sequence[GenerationRequest]) -> list[Endpoint]:
        """Return at most TARGETS_MAX possible targets of these requests, least loaded first.

        The requests have one model and lineage, but may have different adapters. Equally loaded targets are in an order that
        differs between frontends.
        """
        each = {request.served: request for request in requests}.values()
        endpoints = [*{one.key: one for request in each for one in self.routing.targets(request)}.values()]
        first = self._share(len(endpoints))
        by_name = sorted(endpoint.key for endpoint in endpoints)
        turn = {key: (n - first) % len(endpoints) for n, key in enumerate(by_name)}

        def load(endpoint: Endpoint) -> tuple[int, int]:
            fullness = self._in_flight(endpoint) * LOAD_STEPS // max(1, endpoint.joined.profile.max_batch)
            return fullness, turn[endpoint.key]

        return sorted(endpoints, key=load)[:TARGETS_MAX]

    def _share(self, targets: int) -> int:
        """Return the index at which this frontend starts in a list of `targets` equal workers.

        Frontends that know of each other start at evenly spaced indexes. A frontend that knows of no other starts at
        an index derived from its name.
        """
        others = sorted({*self.peers.names(), self.frontend})
        if len(others) > 1:
            return others.index(self.frontend) * targets // len(others)
        return xxhash.xxh32_intdigest(self.frontend.encode()) % max(1, targets)

    def _in_flight(self, endpoint: Endpoint) -> int:
        own, external = endpoint.active + endpoint.kept.requests, self.plane.external_load(endpoint.worker)
        return own if external is None else own + external.running + external.waiting

    def _target(self, endpoint: Endpoint, source: Endpoint | None, newcomers: int = 1) -> MigrationTarget:
        profile, load = endpoint.joined.profile, self.plane.load(endpoint.worker)
        monitor = self.routing.monitor
        # Two counts of tokens to prefill: `queued` ignores prefix caches, `unread` includes the requests of other
        # frontends.
        queued = sum(one.length for one in self.running.at(endpoint) if not one.state.has_output)
        unread = int(sum(monitor.unread_by_rank(endpoint)))
        free = load.kv_total - load.kv_used if load is not None and load.kv_total else BLOCKS_UNKNOWN
        rate = profile.prefill_tokens_per_s or self.policy.prefill_tokens_per_s
        # a worker that registers nonsense must not stop planning for others
        places = max(1, profile.max_batch)
        in_flight = self._in_flight(endpoint)
        step_s = tpot_ms(profile, in_flight + newcomers) / 1000 / max(endpoint.weight, 0.1)
        return MigrationTarget(
            name=endpoint.worker,
            profile=replace(
                profile,
                prefill_tokens_per_s=rate * endpoint.weight,
                block_tokens=max(1, profile.block_tokens),
            ),
            free_blocks=max(0, free),
            lanes=self._lanes(source, endpoint) if source is not None else (),
            queued_tokens=max(queued, unread),
            free_places=max(0, places - in_flight),
            queue_s=RESIDENCE_S * max(0, in_flight + newcomers - places) / places,
            step_s=step_s if 0 <= step_s < STEP_S_MAX else 0.0,
        )

    def _lanes(self, source: Endpoint, target: Endpoint) -> tuple[Lane, ...]:
        """Return the lanes of a KV transfer; () if the target is sharded differently from the source.

        A lane is the path from one shard of the source to the target's shard of the same rank.
        """
        theirs, ours = source.joined, target.joined
        ours_is, theirs_is = ((one.kv, one.tp, one.profile.block_tokens) for one in (ours, theirs))
        if ours_is != theirs_is:
            return ()
        return lanes(self.policy.links, theirs.topology, ours.topology, theirs.tp)


def _kv_shape(source: Endpoint) -> KvShape | None:
    """Return the shape of the source's KV cache. Return None if the source registered no layout, or an invalid one."""
    layout = source.joined.kv
    if layout is None:
        return None
    try:
        return KvShape(
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_size=layout.head_size,
            bytes_per_element=layout.element_bytes,
            tp=source.joined.tp,
        )
    except ValueError:
        return None
