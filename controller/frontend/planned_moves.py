"""Planned moves: requests that move although nothing has failed, their order and their method.

    a worker drains ────────────────────────────┐
    a device of the worker is broken ───────────┤ once per     ┌─ with the KV cache, a few at once; the others keep decoding
    throttled devices cut its weight below half ┼─ incident ──▶┤
    an operator requests holdfast move ─────────┘              ├─ if the cache cannot be sent: recompute (device, operator),
                                                               └─ or the request stays and ends there (drain, throttled)

If recomputation is predicted to be faster than the transfer, the request is recomputed, whatever the cause. Requests
move in order of priority, then of age. The requests of a worker with several shards (tp > 1) are planned together. If
one other worker has room for all, it receives them all; otherwise several workers do. The requests of an unsharded
worker are spread over the other workers.

If a move fails, its stream loses nothing: the stream stays, or is recomputed as shown above. If no worker has room,
the stream stays, whatever the cause, and the move is retried on every tick. A request that is still being prefilled
moves after its first token.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isinf
from typing import TypeAlias

import structlog

from controller.deciders.worker import replacement, spare_awaited
from controller.frontend.dispatch.live_request import HELD_MAX, KvMove, LiveRequest, MigrationRequest
from controller.frontend.dispatch.placement import Placer
from controller.frontend.driver import Driver
from controller.frontend.request import events as on
from controller.frontend.request.effects import TransferOver
from controller.frontend.request.failures import Failure, PlannedCause
from controller.frontend.request.state import Move
from controller.migration import planned_move as kv
from controller.migration.cost import MigrationCost
from controller.migration.placement import Placement
from controller.ports import LostCause, WorkerUnreachable
from controller.router.endpoints import Endpoint, Key
from controller.router.trust import SourceDistrusted, TrustedSource
from events.observations import MoveRequested
from events.wire import Chunk, Committed, Reserved

# share of its weight to which throttled devices must reduce a worker before its requests move
THROTTLED_BELOW = 0.5
# moves that begin per event-loop iteration, because planning one move takes a millisecond or two
BEGINS_MAX = 8
REFUSALS_MAX = 2  # refusals by targets after which a request is not transferred any more
# tokens of KV cache reserved beyond the tokens that the source will probably generate during the transfer
ROOM_TOKENS = 16
NO_ROOM = "no other worker has room"
# causes for which a request is recomputed if its cache cannot be sent
INSISTS: frozenset[PlannedCause] = frozenset({"device_fault", "operator"})

# a placement (with the method) and a target; the target is None if no worker can take the request
Planned: TypeAlias = tuple[Placement, Endpoint | None]
log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False, kw_only=True)
class KvMoveSink(KvMove):
    """Receives the frames of one KV transfer from the request plane. Implements `controller.ports.TransferSink`."""

    moves: "PlannedMoves"
    at_once: int  # number of transfers that share the link, with this one

    def _advance(self, event: kv.Event) -> None:
        live, driver = self.wanted.live, self.moves.driver
        if live.kv_move is self:
            driver.feed(live, live.advanced(event))

    def reserved(self, frame: Reserved) -> None:
        """Handle the target's reservation, which contains the number of tokens that the target has cached.

        The transfer is given up if the target's cache makes recomputing faster.
        """
        live, placer, cached = self.wanted.live, self.moves.placer, frame.cached_tokens
        transfer = live.state.transfer
        if live.kv_move is not self or transfer is None or transfer.state != "asked":
            return
        self.offer = frame
        cost = placer.price(live, self.wanted.source, self.target, cached_tokens=cached, at_once=self.at_once)
        self.predicted_ms = cost.transfer_time_ms
        if cached > 0 and cost.recommended == "reprefill":
            self.cheaper = cost
            self._advance(kv.GivenUp(""))
        else:
            self._advance(kv.TargetReserved())

    def declined(self, stream: int, why: str) -> None:
        """Handle a refusal of the transfer by the source or the target.

        `stream` is the stream number of the declining side.
        """
        self.target_failed = stream == self.stream
        self._advance(kv.MigrationDeclined("target" if self.target_failed else "source", why))

    def committed(self, frame: Committed) -> None:
        """Handle the target's commit, after which the target decodes."""
        self.commit = frame
        self._advance(kv.TargetCommitted(tuple(frame.tokens)))

    def take(self, chunk: Chunk) -> None:
        """Hold the target's output until the source's last token has arrived."""
        if chunk.error is not None:
            self.target_failed = True
            self._advance(kv.Lost(chunk.error))
            return
        self.held.append(chunk)
        if len(self.held) > HELD_MAX:
            self.give_up("the source's last tokens have not arrived")

    def flush(self) -> None:
        """Do nothing, because no chunk of the target may be sent to the client yet."""

    def lost(self, cause: LostCause, detail: str) -> None:
        """Handle the loss of the target during the transfer."""
        self.target_failed = True
        self._advance(kv.Lost(f"target {cause}: {detail}"))

    def give_up(self, why: str) -> None:
        """Abort the transfer. The stream stays at its source."""
        self._advance(kv.GivenUp(why))

    def ended(self, over: TransferOver) -> None:
        """Report the outcome of the transfer to `PlannedMoves`."""
        self.moves.ended(self, over)


@dataclass(eq=False, repr=False)
class PlannedMoves:
    """Starts the planned moves of one frontend, and limits how many run at once."""

    placer: Placer
    driver: Driver
    # reasons to move the requests of each worker instance, at the last check
    _standing: dict[Key, frozenset[PlannedCause]] = field(default_factory=dict)
    # requests to move, by source, in the order in which they move
    _wanted: dict[Key, list[MigrationRequest]] = field(default_factory=dict)
    transfers: dict[LiveRequest, KvMoveSink] = field(default_factory=dict)  # those in progress
    # sources from which more moves start in the next event-loop iteration
    _due: set[Key] = field(default_factory=set)
    # reasons for staying that were logged, so that each is logged once per incident
    _excused: set[tuple[Key, PlannedCause, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        placer, driver = self.placer, self.driver
        self.policy, self.plane, self.running = placer.policy, placer.plane, placer.running
        self.table, self.routing, self._now = driver.table, driver.routing, driver.now

    # --- selecting the requests to move -------------------------------------------------------------------

    def look(self) -> None:
        """Start moves from workers with a new reason to move, and drop waiting moves with a reason that no longer holds.

        Called after a change of the endpoint table or of a connection. A worker that was resumed or repaired keeps
        the requests that have not moved yet.
        """
        before, self._standing = self._standing, {}
        for endpoint in list(self.table.endpoints.values()):
            reasons = self._reasons(endpoint)
            if reasons:
                self._standing[endpoint.key] = reasons
                for cause in sorted(reasons - before.get(endpoint.key, frozenset())):
                    self._want(endpoint, cause)
        for key, there in list(self._wanted.items()):
            standing = {"operator", *self._standing.get(key, ())}
            for wanted in [wanted for wanted in there if wanted.cause not in standing]:
                self._drop(key, wanted)
        self._excused = {reason for reason in self._excused if reason[0] in self.table.endpoints}

    def _reasons(self, endpoint: Endpoint) -> frozenset[PlannedCause]:
        worker, found = self.table.worker(endpoint), set[PlannedCause]()
        if self.plane.draining(endpoint.worker, endpoint.instance) or self.table.drains(endpoint):
            found.add("drain")
        if worker is not None and worker.health.limits:
            limit = worker.health.limit
            if limit == 0.0:
                if not spare_awaited(worker, self.table.workers):
                    found.add("device_fault")
            elif limit < THROTTLED_BELOW:
                found.add("throttled")
        return frozenset(found)

    def requested(self, fact: MoveRequested) -> None:
        """Move the requests of a worker because an operator requests it.

        Requests to move from an unknown worker are ignored.
        """
        endpoint = self.table.endpoints.get((fact.worker, fact.instance))
        if endpoint is not None:
            self._want(endpoint, "operator", fact.to)

    def _want(self, endpoint: Endpoint, cause: PlannedCause, to: str = "") -> None:
        there = [live for live in self.running.at(endpoint) if not live.stays]
        if not there or (cause == "drain" and self.policy.on_drain == "finish"):
            return
        planned = self._group(there, endpoint, to)
        wanted_by = {wanted.live: wanted for wanted in self._wanted.get(endpoint.key, ())}
        for live in there:
            if cause in INSISTS or live not in wanted_by:
                wanted_by[live] = MigrationRequest(live, endpoint, cause, to, planned.get(live, ""))
        self._excused = {reason for reason in self._excused if reason[0] != endpoint.key}
        log.info("moves_wanted", worker=endpoint.worker, cause=cause, requests=len(there))
        urgency = self.table.urgency
        order = {live: (urgency(live.request.tier), live.state.began_at) for live in wanted_by}
        self._wanted[endpoint.key] = [wanted_by[live] for live in sorted(wanted_by, key=order.__getitem__)]
        self._pump(endpoint.key)

    def _drop(self, key: Key, wanted: MigrationRequest) -> None:
        there = self._wanted.get(key, [])
        if wanted in there:
            there.remove(wanted)
        if not there:
            self._wanted.pop(key, None)

    # --- choosing target and method -----------------------------------------------------------------------

    def _group(self, there: Sequence[LiveRequest], source: Endpoint, to: str) -> dict[LiveRequest, str]:
        """Return the target of each request that a joint plan transfers; {} if each request is planned separately.

        Requests are planned jointly if a spare replaces their worker, or if two or more of them leave a sharded
        worker (tp > 1). One target receives all of them if it has room, otherwise several do.
        """
        spare = "" if to else replacement(source.worker, self.table.workers)
        if not there or (not spare and (len(there) < 2 or source.joined.tp == 1)):
            return {}
        plan = self.placer.plan(there, source, to or spare)
        return {
            live: p.target for live, p, endpoint in plan if endpoint is not None and p.method == "transfer"
        }

    def _plan(self, wanted: MigrationRequest) -> Planned:
        """Return the method and target for a request.

        If the request was planned together with others, its target from that plan is used, unless the KV cache can no
        longer be sent there. In all other cases, the request is planned now.
        """
        if wanted.planned:
            placement, endpoint = self._plan_one(wanted, wanted.source, wanted.planned, wanted.without)
            if endpoint is not None and placement.method == "transfer":
                return placement, endpoint
        return self._plan_one(wanted, wanted.source, wanted.to, wanted.without)

    def _plan_anew(self, wanted: MigrationRequest) -> Planned:
        """Return the worker, other than the source, that would recompute the request soonest, with its placement.

        A worker that refused the request's KV cache is chosen only as the last resort. Each request is planned
        separately, so a group that fits on no single worker is spread.
        """
        source = frozenset({wanted.source.worker})
        placement, endpoint = self._plan_one(wanted, None, wanted.to, wanted.without | source)
        if endpoint is None and wanted.without:
            placement, endpoint = self._plan_one(wanted, None, wanted.to, source)
        return placement, endpoint

    def _plan_one(
        self, wanted: MigrationRequest, source: Endpoint | None, to: str, without: frozenset[str]
    ) -> Planned:
        ((_, placement, endpoint),) = self.placer.plan([wanted.live], source, to, without)
        return placement, endpoint if endpoint is not None and self.routing.takes(endpoint) else None

    def _objection(self, placement: Placement) -> str:
        """Return why the request's KV cache is not sent. Return an empty string if recomputing is simply faster."""
        cost = placement.cost
        if cost is None:
            return NO_ROOM
        if isinf(cost.transfer_time_ms):
            return "its KV cache cannot be sent there"
        limit_ms, takes_ms = self.policy.max_migration_time_ms, cost.transfer_time_ms
        return f"it would take {takes_ms:.0f} of {limit_ms:g} ms" if takes_ms > limit_ms else ""

    # --- moving them --------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Abort transfers that take too long, and start moves that have become possible."""
        now, limit_ms = self._now(), self.policy.max_migration_time_ms
        for transfer in list(self.transfers.values()):
            if now - transfer.began_at > limit_ms / 1000:
                transfer.give_up(f"it took longer than {limit_ms:g} ms")
        for key in list(self._wanted):
            self._pump(key)

    def _pump(self, key: Key) -> None:
        """Start moves from this worker, up to the limit on moves at once.

        At most BEGINS_MAX moves start per event-loop iteration.
        """
        self._due.discard(key)
        ready = [wanted for wanted in self._wanted.get(key, ()) if wanted.stale or wanted.ready]
        for begun, wanted in enumerate(ready):
            if begun == BEGINS_MAX:
                self._due.add(key)
                asyncio.get_running_loop().call_soon(self._continue_moves, key)
                return
            under_way = sum(transfer.wanted.source.key == key for transfer in self.transfers.values())
            if under_way >= self.policy.transfers_at_once:
                return
            self._drop(key, wanted)
            if wanted.ready and not wanted.stale and not self._begin(wanted):
                return

    def _continue_moves(self, key: Key) -> None:
        if key in self._due:
            self._pump(key)

    def _begin(self, wanted: MigrationRequest) -> bool:
        """Start to move one request. Return False if the request must wait for the link or for room at a target.

        A request that waits keeps decoding at its source.
        """
        if wanted.live.stays:
            return True
        source, limit_ms = wanted.source, self.policy.max_migration_time_ms
        placement, target = self._plan(wanted)
        carries = placement.method == "transfer" and wanted.live.request.grammar is None
        if target is None or not carries or placement.cost is None:
            why = wanted.why or self._objection(placement)
            if placement.method == "transfer" and not (why or carries):
                why = "the grammar of its answer can only be continued from text"
            if why or target is None:
                return self._not_transferred(wanted, why)
            self._compute_again(wanted, placement.cost, target)
            return True
        others = sum(c.wanted.source is source or c.target is target for c in self.transfers.values())
        if others and placement.cost.transfer_time_ms * (1 + others) > limit_ms:
            self._wanted.setdefault(source.key, []).insert(0, wanted)
            return False
        try:
            TrustedSource(self.table.worker(source))
            self._reserve(wanted, target, 1 + others)
        except (SourceDistrusted, WorkerUnreachable) as error:
            return self._not_transferred(wanted, str(error))
        return True

    def _reserve(self, wanted: MigrationRequest, target: Endpoint, at_once: int) -> None:
        """Reserve room at the target and begin the transfer. Raise WorkerUnreachable if the target is not connected."""
        live, now, within_s = wanted.live, self._now(), self.policy.max_migration_time_ms / 1000
        dispatch, accepted = live.dispatch, live.accepted
        assert dispatch is not None
        transfer = KvMoveSink(
            wanted=wanted,
            source_stream=dispatch.stream,
            base=len(accepted),
            target=target,
            rank=self.routing.choose([target], live.request, accepted).holder.rank,
            began_at=now,
            moves=self,
            at_once=at_once,
        )
        request = live.continuation.request(target, transfer.rank)
        per_s = len(accepted) / max(1e-3, now - (live.stats.first_at or now))
        room = len(request.tokens) + min(request.sampling.max_tokens, ROOM_TOKENS + int(within_s * per_s))
        transfer.stream = self.plane.reserve(target.worker, target.instance, request, room, transfer)
        target.admit()
        live.kv_move = self.transfers[live] = transfer
        self.driver.feed(live, on.TransferBegun())

    def _not_transferred(self, wanted: MigrationRequest, why: str) -> bool:
        """Handle the case that a request's KV cache is not sent to a target, for the reason `why`.

        Return False if the request waits for room, otherwise True.

        If no other worker has room, the request waits at its source, because recomputing would need the same room, and
        the stream would be silent meanwhile. If there is room, and a broken device or an operator causes the move, the
        request is recomputed on another worker. In all other cases, the request stays at its source.
        """
        full = why.startswith((NO_ROOM, "overloaded"))
        if wanted.cause in INSISTS and not full:
            placement, endpoint = self._plan_anew(wanted)
            if endpoint is not None:
                self._compute_again(wanted, placement.cost, endpoint, why)
                return True
        self.driver.feed(wanted.live, on.TransferDeclined(why))
        reason = (wanted.source.key, wanted.cause, why.partition(":")[0])
        if reason not in self._excused:
            self._excused.add(reason)
            log.info("streams_stay", worker=wanted.source.worker, cause=wanted.cause, why=why)
        if full:
            again = replace(wanted, planned="", without=frozenset(), why="")
            self._wanted.setdefault(wanted.source.key, []).append(again)
        return not full

    def _compute_again(
        self, wanted: MigrationRequest, cost: MigrationCost | None, endpoint: Endpoint, why: str = ""
    ) -> None:
        """Move a request to `endpoint`, where the request's KV cache is recomputed from the tokens."""
        live, reason, source = wanted.live, Failure(wanted.cause, ""), wanted.source.server
        predicted_ms = cost.reprefill_time_ms if cost is not None else None
        move = Move(reason, reason, source, self._now(), len(live.accepted), None, predicted_ms, why)
        self.driver.feed(live, on.MovedOnPurpose(move, endpoint.key))

    def ended(self, transfer: KvMoveSink, over: TransferOver) -> None:
        """Continue after a transfer has ended: recompute the request, try another target, or let the request stay."""
        wanted, cheaper = transfer.wanted, transfer.cheaper
        del self.transfers[wanted.live]
        pump = over.state == "switched" or bool(over.why) or cheaper is not None
        if cheaper is not None and not wanted.stale:
            self._compute_again(wanted, cheaper, transfer.target)
        elif over.state == "stayed" and over.why and not wanted.stale:
            if transfer.target_failed and len(wanted.without) < REFUSALS_MAX:
                without = wanted.without | {transfer.target.worker}
                pump = self._begin(replace(wanted, without=without, why=wanted.why or over.why))
            else:
                pump = self._not_transferred(wanted, wanted.why or over.why)
        if pump:
            # otherwise the next tick starts more moves, because this request is still moving or waits
            self._pump(wanted.source.key)
