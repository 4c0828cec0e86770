"""Detects requests that bring workers down, or fail in the same way wherever they are sent.

    unknown ── its first copy is on its way: others go where it went, or wait ── its first token ──▶ proven
       │ where suspects are tried it does not go, if it can go elsewhere
       │ the worker fell before any token (`fell`)
       ▼
    suspect ── tried with no other suspect beside it ── its first token ──▶ proven
       │ the next worker fell, too, and neither was back when it was to be tried again
       ▼
    poisonous: refused for a while; then a suspect once more, for twice as long the next time

A worker that fell lately without an untried request aboard (`fell_by_itself`) shows that workers fall for other reasons. Each
such worker raises the number of falls that make a request poisonous by one, by two at most.

A request that fails with an error (`failed`) goes on elsewhere as always; the same error, behind the same token, on a second
worker that fails no other request, shows that it is the request's own fault. So does a stream that stalls while its worker
continues.

An engine that is stuck has fallen, too, where its worker's loop lives and says so, and it had brought tokens shortly before. A
worker that is silent has not: it was more often stopped, or cut off with others that were idle. Stuck engines are weaker evidence
than dead ones, which may have hung together: the like of such a request is refused for as short as of one that only fails.

Alike are requests of the same prompt and form (`request.fingerprint`). With each request only a sketch of its
prompt is looked up, which takes a microsecond; only what has failed is told apart exactly.

What a reader would get wrong: a suspect is most likely innocent. Each request still unread on a worker that lost power is one.
"""

import re
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import msgspec
import structlog
import xxhash

from controller.frontend.health.local_breakers import LocalBreakers
from controller.frontend.request.failures import Suspicion
from controller.frontend.request.fingerprint import fingerprint, sketch_of
from controller.frontend.request.state import GenerationRequest
from controller.frontend.settings import PoisonSettings
from controller.ports import Observe
from controller.router.endpoints import ConnectedWorkers, Endpoint, Key
from controller.router.selection.filter import NoWorker
from events.observations import RequestPoisonous, RequestSuspected

log = structlog.get_logger(__name__)

SETTLED_S = 0.2  # after a fall: what only lost its connection is back, and what died with it is gone
CONNECTION = "disconnected"
STUCK = "stalled"
FALLS = frozenset((CONNECTION, "upstream_lost"))  # a worker is lost; see `brings_down` for one that is stuck
OTHER_FALLS_S = 60.0  # so long a fall without an untried request is evidence of another cause
OTHER_FALLS_MAX = 2  # with them a request has at most as many attempts as its default budget
WORKED_S = 60.0  # an engine that has brought a token within that was well when the request came
PROVEN_MAX = 8192  # sketches of prompts that have been answered
FLIGHTS_MAX = 65_536  # prompts without any token yet
NUMBERS = re.compile(r"(?:0x)?[0-9a-f]{8,}|\d+")  # in an error's words: they differ from one time to the next


class Held(NoWorker):
    """Whether this request brings workers down is being found out."""

    code = "held"


class Poisonous(NoWorker):
    """Requests like this one have failed in the same way on two workers; it is not tried again for a while."""

    code = "request_poisonous"


class Flight(msgspec.Struct, eq=False):
    """The copies of one unknown prompt that are with a worker."""

    endpoint: Endpoint
    slots: set[int]  # the router's numbers of their attempts


class Fall(msgspec.Struct, frozen=True):
    """A worker was lost."""

    at: float
    reason: str


class Record(msgspec.Struct, eq=False):
    """What is held against the requests of one fingerprint."""

    fingerprint: str
    fell: dict[Key, Fall]  # lives of workers that fell with it
    failed: dict[
        "Way", dict[Key, int]
    ]  # by the way in which it failed: at which worker, sent under which decision
    together: bool = False  # the last of them fell with other suspects
    at: Endpoint | None = None  # where a copy of it is being tried
    slot: int = 0  # the router's number of that attempt
    alone: bool = False  # no other suspect is there
    held_since: float | None = None  # since when a copy has waited for a worker without other suspects
    refused_until: float = 0.0
    refusals: int = 0  # how often it was found poisonous

    @property
    def suspected(self) -> bool:
        """Whether it may bring workers down."""
        return bool(self.fell or self.refusals)


class Way(msgspec.Struct, frozen=True):
    """A way in which requests fail. Of the error's words, which may be the client's, only a hash is kept."""

    reason: str
    detail: int
    tokens: int  # accepted until then

    @classmethod
    def of(cls, reason: str, detail: str, tokens: int) -> "Way":
        """Leave out what differs from one time to the next."""
        return cls(reason, xxhash.xxh3_64_intdigest(NUMBERS.sub("#", detail).encode()), tokens)


class Where(msgspec.Struct, frozen=True):
    """Where a request may go that may not go anywhere: only to `endpoint`, or, if there is none, to no worker of `avoid`. If no
    other worker is left it waits (`waits`), or goes to one of these."""

    endpoint: Endpoint | None = None
    avoid: frozenset[Key] = frozenset()
    waits: bool = False


class Records(OrderedDict[str, Record]):
    """Failure records of requests, by fingerprint, and the sketches of prompts that are proven poisonous. Bounded: the least
    recently used record is evicted."""

    def __init__(self, records_max: int) -> None:
        super().__init__()
        self.proven: OrderedDict[int, None] = OrderedDict()
        self._max = records_max
        self._sketches: Counter[int] = Counter()  # of the fingerprints

    def of(self, request: GenerationRequest) -> Record | None:
        """Return the record of requests like this one; None if there is none."""
        return self.get(_fingerprint(request)) if request.names.sketch in self._sketches else None

    def keep(self, print_: str) -> Record:
        """Return the record of a fingerprint, which is made if there is none. Raise ValueError if it is no fingerprint."""
        record = self.get(print_)
        if record is None:
            sketch = sketch_of(print_)
            if len(self) >= self._max:
                self.forget(next(iter(self.values())))
            record = self[print_] = Record(print_, {}, {})
            self._sketches[sketch] += 1
            self.proven.pop(sketch, None)
        self.move_to_end(print_)
        return record

    def forget(self, record: Record) -> None:
        """Remove the record of these requests."""
        del self[record.fingerprint]
        sketch = sketch_of(record.fingerprint)
        self._sketches[sketch] -= 1
        if not self._sketches[sketch]:
            del self._sketches[sketch]

    def prove(self, sketch: int) -> None:
        """Remember that a prompt has brought a token."""
        self.proven[sketch] = None
        if len(self.proven) > PROVEN_MAX:
            self.proven.popitem(last=False)

    def tried_at(self) -> frozenset[Key]:
        """Return the workers at which suspects are being tried."""
        return frozenset(one.at.key for one in self.values() if one.at is not None)


@dataclass(eq=False, repr=False)
class PoisonWatch:
    """What one frontend knows of requests that bring workers down."""

    frontend: str
    settings: PoisonSettings
    breakers: LocalBreakers
    links: ConnectedWorkers
    observe: Observe
    resolved: bool = False  # one that was waited for is resolved; the driver resets it
    _held: bool = False  # some request waits
    _flights: dict[int, Flight] = field(default_factory=dict)  # by sketch
    _fallen: dict[Key, Fall] = field(
        default_factory=dict
    )  # lives that fell under requests that had brought tokens

    def __post_init__(self) -> None:
        self._now = self.breakers.now
        self._records = Records(self.settings.records_max)

    # --- where may it go? -----------------------------------------------------------------------------------

    def where(self, request: GenerationRequest) -> Where | None:
        """Return where a request may go; None: anywhere. Raise Held or Poisonous."""
        records, sketch = self._records, request.names.sketch
        if records and (record := records.of(request)) is not None:
            return self._doubted(request, record)
        if sketch in records.proven:
            return None
        if (flight := self._flights.get(sketch)) is not None:
            return Where(flight.endpoint, waits=True)
        tried = records.tried_at() if records else None
        return Where(avoid=tried) if tried else None  # its own first tokens would show nothing of a suspect

    def _doubted(self, request: GenerationRequest, record: Record) -> Where | None:
        now, settings = self._now(), self.settings
        record.fell = {key: fall for key, fall in record.fell.items() if self._down(key, fall, now)}
        falls = record.fell.values()
        if falls and now - max(fall.at for fall in falls) < SETTLED_S:
            raise self._hold(record, now)
        suspicious = len(falls) + min(record.refusals, 1)
        if falls and not record.together and suspicious > 1 + self._other_falls(now):
            reasons = [fall.reason for fall in falls]
            refused_s = settings.failed_s if STUCK in reasons else settings.refused_s
            self._condemn(request, record, reasons[0], dict.fromkeys(record.fell, 0), refused_s)
        if now < record.refused_until:
            raise Poisonous
        if not record.suspected:
            avoid = frozenset(key for keys in record.failed.values() for key in keys)
            return Where(avoid=avoid) if avoid else None
        if record.at is not None:  # a copy of it is being tried
            raise self._hold(record, now)
        late = record.held_since is not None and now - record.held_since > settings.alone_s
        return Where(avoid=self._records.tried_at(), waits=not late or record.together)

    def hold(self, request: GenerationRequest) -> Held:
        """Return the error of a request for which there is no worker now that it may go to."""
        return self._hold(self._records.of(request), self._now())

    def _hold(self, record: Record | None, now: float) -> Held:
        self._held = True
        if record is not None and record.held_since is None:
            record.held_since = now
        return Held()

    # --- what becomes of it ---------------------------------------------------------------------------------

    def sent(self, request: GenerationRequest, endpoint: Endpoint, slot: int) -> None:
        """A request was sent to a worker, as the attempt of this number."""
        records, sketch = self._records, request.names.sketch
        record = records.of(request) if records else None
        if record is not None and record.suspected:
            others = any(one.at is endpoint for one in records.values() if one is not record)
            record.at, record.slot, record.alone, record.held_since = endpoint, slot, not others, None
        elif sketch not in records.proven:
            for suspect in records.values():
                if suspect.at is endpoint:
                    suspect.alone = False  # a failure now has no certain cause
            flight = self._flights.get(sketch)
            if flight is not None and flight.endpoint is endpoint:
                flight.slots.add(slot)
            elif flight is None and len(self._flights) < FLIGHTS_MAX:
                self._flights[sketch] = Flight(endpoint, {slot})

    def read(self, request: GenerationRequest, key: Key) -> None:
        """A request has brought a token from this worker: its like brings no worker down."""
        self.breakers.outcomes(key).worked_at = self._now()
        records, sketch = self._records, request.names.sketch
        if records and (record := records.of(request)) is not None:
            record.fell, record.together, record.at, record.slot, record.refusals = {}, False, None, 0, 0
            if not record.failed:
                records.forget(record)
        self._flights.pop(sketch, None)
        if sketch not in records.proven:
            records.prove(sketch)
        self._found_out()

    def served(self, request: GenerationRequest) -> None:
        """An answer was completed: whatever was held against its like is void."""
        if self._records and (record := self._records.of(request)) is not None:
            self._records.forget(record)

    def left(self, request: GenerationRequest, slot: int) -> None:
        """An attempt has ended, in whatever way."""
        records, sketch = self._records, request.names.sketch
        if (flight := self._flights.get(sketch)) is not None:
            flight.slots.discard(slot)
            if not flight.slots:
                del self._flights[sketch]
                self._found_out()
        if records and (record := records.of(request)) is not None and record.slot == slot:
            record.at, record.slot, record.alone = None, 0, False
            self._found_out()

    def _found_out(self) -> None:
        if self._held:
            self._held = False
            self.resolved = True

    # --- failures -------------------------------------------------------------------------------------------

    def fell(self, request: GenerationRequest, endpoint: Endpoint, slot: int, reason: str) -> None:
        """A worker fell, for this reason, before a request had brought a token there: it is a suspect."""
        record, key = self._records.keep(_fingerprint(request)), endpoint.key
        record.together = bool(record.fell) and not (record.slot == slot and record.alone)
        known = key in record.fell
        record.fell[key] = Fall(self._now(), reason)
        if not known:
            self.observe(
                RequestSuspected(
                    worker=endpoint.worker,
                    instance=endpoint.instance,
                    frontend=self.frontend,
                    request=request.id,
                    model=request.model,
                    fingerprint=record.fingerprint,
                    reason=reason,
                    prompt_tokens=len(request.prompt),
                ),
                traceparent=request.traceparent,
            )

    def fell_by_itself(self, key: Key, reason: str) -> None:
        """Note that a worker fell, for this reason, under a request that had brought a token there."""
        if key not in self._fallen and len(self._fallen) >= self.settings.records_max:
            del self._fallen[next(iter(self._fallen))]
        self._fallen[key] = Fall(self._now(), reason)

    def _other_falls(self, now: float) -> int:
        """Return how many workers fell lately that no untried request can have brought down, `OTHER_FALLS_MAX` at most."""
        self._fallen = {key: fall for key, fall in self._fallen.items() if now - fall.at < OTHER_FALLS_S}
        suspected = {key for record in self._records.values() for key in record.fell}
        others = (
            key for key, fall in self._fallen.items() if key not in suspected and self._down(key, fall, now)
        )
        return min(sum(1 for _ in others), OTHER_FALLS_MAX)

    def _down(self, key: Key, fall: Fall, now: float) -> bool:
        """Return whether a failure is still remembered and was a real one. A worker that only lost its connection comes back as
        the same life."""
        if now - fall.at >= self.settings.remembered_s:
            return False
        return fall.reason not in (CONNECTION, STUCK) or not self.links.reachable(*key)

    def brings_down(self, reason: str, key: Key, *, one_stream: bool, connected: bool) -> bool:
        """Return whether a failure means that the worker fell. `connected`: its loop can still be heard."""
        if reason != STUCK:
            return reason in FALLS
        worked_at = self.breakers.outcomes(key).worked_at
        worked = worked_at is not None and self._now() - worked_at <= WORKED_S
        return connected and not one_stream and worked

    def failed(self, request: GenerationRequest, key: Key, way: "Way", routed_under: int) -> Suspicion:
        """A request failed in this way, which its worker has survived and was blamed for. Return what that makes of it."""
        record = self._records.keep(_fingerprint(request))
        there = record.failed.setdefault(way, {})
        there[key] = routed_under
        everywhere = len({worker for worker, _ in there}) > 1
        if not everywhere or any(self.breakers.outcomes(key).fails_others for key in there):
            return Suspicion.NONE
        self._condemn(request, record, way.reason, there, self.settings.failed_s)
        return Suspicion.POISONOUS

    def repeats(self, request: GenerationRequest, key: Key, way: "Way") -> bool:
        """Return whether the like of a request has failed there in this way already, and was answered nowhere since: that says
        no more of the worker than the first failure did."""
        record = self._records.of(request)
        return record is not None and key in record.failed.get(way, ())

    def _condemn(
        self, request: GenerationRequest, record: Record, reason: str, where: dict[Key, int], refused_s: float
    ) -> None:
        """A request is poisonous: take back what it counted against its workers, report it, and refuse its like."""
        wait_s = min(refused_s * 2.0 ** min(record.refusals, 20), self.settings.refused_s_max)
        record.refusals += 1
        record.refused_until = self._now() + wait_s
        guided = next(iter(request.guided), "") if request.guided else ""
        for (worker, instance), routed_under in where.items():
            self._fallen.pop((worker, instance), None)  # its cause is known now
            outcomes = self.breakers.outcomes((worker, instance))
            outcomes.take_back(one_stream=reason == STUCK and not record.fell)
            self.observe(
                RequestPoisonous(
                    worker=worker,
                    instance=instance,
                    frontend=self.frontend,
                    request=request.id,
                    model=request.model,
                    fingerprint=record.fingerprint,
                    reason=reason,
                    prompt_tokens=len(request.prompt),
                    max_tokens=request.sampling.max_tokens,
                    guided=guided,
                    failures_in_a_row=outcomes.failures,
                    routed_under=routed_under,
                    refused_s=wait_s,
                ),
                traceparent=request.traceparent,
            )
        log.warning("request_poisonous", request=request.id, reason=reason, refused_s=wait_s,
                    workers=[worker for worker, _ in where])  # fmt: skip
        record.fell, record.failed = {}, {}
        self._found_out()

    # --- what other frontends report ------------------------------------------------------------------------

    def heard(self, fact: RequestSuspected | RequestPoisonous, age_s: float) -> None:
        """Apply the report of another frontend, or of this one's predecessor, from `age_s` seconds ago."""
        at = self._now() - age_s
        holds_s = fact.refused_s if isinstance(fact, RequestPoisonous) else self.settings.remembered_s
        if age_s >= holds_s:
            return
        try:
            record = self._records.keep(fact.fingerprint)
        except ValueError:
            return
        if isinstance(fact, RequestSuspected):
            record.fell.setdefault((fact.worker, fact.instance), Fall(at, fact.reason))
        else:
            record.refused_until = max(record.refused_until, at + fact.refused_s)
            record.refusals = max(record.refusals, 1)
            record.fell, record.failed = {}, {}


def _fingerprint(request: GenerationRequest) -> str:
    return fingerprint(request.names.sketch, request.model, request.prompt, request.guided)
