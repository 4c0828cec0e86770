"""Detects requests that crash workers, or that fail in the same way on every worker.

    unknown ── the first copy runs: further copies go to the same worker, or wait ── first token ──▶ proven
      │ avoids workers where suspects are tried, if another worker is available
      │ the worker died before the first token (`fell`)
      ▼
    suspect ── tried on a worker without other suspects ── first token ──▶ proven
      │ the next worker died, too, and neither worker had returned when the request was to be tried again
      ▼
    poisonous: refused for a while; then a suspect again, and refused for twice as long the next time

The diagram shows the states of all requests with one fingerprint. The fingerprint identifies the model, prompt and
output constraint. A request is unproven before its first token.

Workers also die for other reasons. A recent death of a worker on which no unproven request ran (`fell_by_itself`) is
evidence of another reason. Normally two deaths make a request poisonous. Each recent death for another reason raises
this number by one, up to four.

A request that fails with an error (`failed`) is retried on another worker as usual. The request itself is at fault if
a second worker, on which no other request fails, returns the same error after the same number of tokens. This
rule also holds for a stream that stalls while its worker runs.

A stuck engine counts as dead if its worker's event loop still reports the hang, and the engine had produced tokens
shortly before. A silent worker does not count as dead: most silent workers were stopped, or lost the network at
the same time as idle workers. Stuck engines are weaker evidence than dead workers, because engines may hang for a
common reason. So a request that is poisonous because of stuck engines is refused for a shorter time, the same as for
a request that merely fails.

For each request, the sketch (a short hash) of its prompt is looked up, which takes a microsecond. Only a request with
the same sketch as a failed request is compared exactly.

Most suspects are innocent: if a worker loses power, each of its requests that has no token yet becomes a suspect.
"""

import json
import re
from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import structlog
import xxhash

from controller.frontend.health.local_breakers import LocalBreakers
from controller.frontend.request.failures import Suspicion
from controller.frontend.request.state import GenerationRequest
from controller.frontend.settings import PoisonSettings
from controller.ports import Observe
from controller.router.endpoints import ConnectedWorkers, Endpoint, Key
from controller.router.selection.filter import NoWorker
from events.observations import RequestPoisonous, RequestSuspected

log = structlog.get_logger(__name__)

# Seconds to wait after a worker's death. By then a lost connection is restored, and all workers that died together
# are known.
SETTLED_S = 0.2
CONNECTION = "disconnected"
STUCK = "stalled"
# reasons of a lost worker; for a stuck engine see `brings_down`
FALLS = frozenset((CONNECTION, "upstream_lost"))
OTHER_FALLS_S = 60.0  # seconds for which a death without an unproven request is evidence of another cause
OTHER_FALLS_MAX = 2  # so that a poisonous request needs no more attempts than the default budget allows
# an engine that produced a token within this many seconds was healthy when the request arrived
WORKED_S = 60.0
PROVEN_MAX = 8192  # remembered sketches of prompts that have produced a token
FLIGHTS_MAX = 65_536  # remembered prompts that run and have no token yet
SKETCH_MASK = 2**64 - 1
NUMBERS = re.compile(r"(?:0x)?[0-9a-f]{8,}|\d+")  # numbers in error texts, which differ each time


class Held(NoWorker):
    """The request waits until a test has shown whether it crashes workers."""

    code = "held"


class Poisonous(NoWorker):
    """Requests like this one have failed in the same way on two workers; they are refused for a while."""

    code = "request_poisonous"


class Flight(msgspec.Struct, eq=False):
    """The running requests with one prompt that have not produced a token yet. All of them run on one worker."""

    endpoint: Endpoint
    slots: set[int]  # slot numbers of their attempts in the slot tracker


class Fall(msgspec.Struct, frozen=True):
    """The time and reason of a worker's death while a request ran on it."""

    at: float
    reason: str


class Record(msgspec.Struct, eq=False):
    """The evidence that requests with one fingerprint crash workers or always fail."""

    fingerprint: str
    fell: dict[Key, Fall]  # worker instances that died while such a request ran on them
    # by kind of failure: the workers, each with the decision number under which the request was sent
    failed: dict["Way", dict[Key, int]]
    together: bool = False  # other suspects ran on the last worker that died
    at: Endpoint | None = None  # worker on which a copy of the request is being tried
    slot: int = 0  # slot number of that attempt
    alone: bool = False  # whether no other suspect runs on that worker
    held_since: float | None = None  # time since which a copy waits for a worker without other suspects
    refused_until: float = 0.0
    refusals: int = 0  # number of times the request was found poisonous

    @property
    def suspected(self) -> bool:
        """Whether requests with this fingerprint may crash workers."""
        return bool(self.fell or self.refusals)


class Way(msgspec.Struct, frozen=True):
    """A kind of failure: its reason, a hash of its error text, and the number of tokens before it.

    The error text itself is not kept, because it may contain client input.
    """

    reason: str
    detail: int
    tokens: int  # tokens accepted before the failure

    @classmethod
    def of(cls, reason: str, detail: str, tokens: int) -> "Way":
        """Return the kind of a failure. Numbers in the error text are ignored, because they differ each time."""
        return cls(reason, xxhash.xxh3_64_intdigest(NUMBERS.sub("#", detail).encode()), tokens)


class Where(msgspec.Struct, frozen=True):
    """A restriction of the workers to which a request may be sent.

    The request may be sent only to `endpoint` or, if `endpoint` is None, to any worker outside `avoid`. If no permitted
    worker is available, the request waits if `waits` is true. If `waits` is false, the restriction is dropped instead.
    """

    endpoint: Endpoint | None = None
    avoid: frozenset[Key] = frozenset()
    waits: bool = False


class Records(OrderedDict[str, Record]):
    """Failure records by fingerprint, and the sketches (short hashes) of prompts that were proven harmless.

    The number of records is limited: the least recently used record is evicted.
    """

    def __init__(self, records_max: int) -> None:
        super().__init__()
        self.proven: OrderedDict[int, None] = OrderedDict()
        self._max = records_max
        self._sketches: Counter[int] = Counter()  # sketches of the recorded fingerprints

    def of(self, request: GenerationRequest) -> Record | None:
        """Return the record for this request's fingerprint, or None if there is none."""
        return self.get(fingerprint(request)) if request.names.sketch in self._sketches else None

    def keep(self, print_: str) -> Record:
        """Return the record of a fingerprint, creating it if necessary. Raise ValueError if the fingerprint is invalid."""
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
        """Remove a record, and the sketch (short hash) of its prompt."""
        del self[record.fingerprint]
        sketch = sketch_of(record.fingerprint)
        self._sketches[sketch] -= 1
        if not self._sketches[sketch]:
            del self._sketches[sketch]

    def tried_at(self) -> frozenset[Key]:
        """Return the workers on which a suspected request is being tried."""
        return frozenset(one.at.key for one in self.values() if one.at is not None)


def counts_still(key: Key, fall: Fall, now: float, settings: PoisonSettings, links: ConnectedWorkers) -> bool:
    """Return whether the death of a worker still counts as evidence: it is recent, and not disproved.

    A death that was inferred from a lost connection or a stuck engine is disproved when the same worker instance is
    reachable again.
    """
    if now - fall.at >= settings.remembered_s:
        return False
    return fall.reason not in (CONNECTION, STUCK) or not links.reachable(*key)


@dataclass(eq=False, repr=False)
class PoisonWatch:
    """Detects requests that may crash workers, in one frontend, and restricts the workers to which they are sent."""

    frontend: str
    settings: PoisonSettings
    breakers: LocalBreakers
    links: ConnectedWorkers
    observe: Observe
    resolved: bool = False  # the case of a request that others waited for is resolved; the driver resets this
    _held: bool = False  # at least one request waits
    _flights: dict[int, Flight] = field(default_factory=dict)  # by sketch
    # worker instances that died while running requests that had produced tokens
    _fallen: dict[Key, Fall] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._now = self.breakers.now
        self._records = Records(self.settings.records_max)

    # --- where a request may go -----------------------------------------------------------------------------

    def where(self, request: GenerationRequest) -> Where | None:
        """Return a restriction of the workers to which a request may be sent, or None if any worker may get it.

        Raise Held if the request must wait. Raise Poisonous if the request is refused.
        """
        records, sketch = self._records, request.names.sketch
        if records and (record := records.of(request)) is not None:
            return self._doubted(request, record)
        if sketch in records.proven:
            return None
        if (flight := self._flights.get(sketch)) is not None:
            return Where(flight.endpoint, waits=True)
        tried = records.tried_at() if records else None
        # if a suspect's worker died, an unknown request on it would make the cause ambiguous
        return Where(avoid=tried) if tried else None

    def _doubted(self, request: GenerationRequest, record: Record) -> Where | None:
        now = self._now()
        record.fell = {
            key: fall
            for key, fall in record.fell.items()
            if counts_still(key, fall, now, self.settings, self.links)
        }
        if record.fell:
            self._judge_falls(request, record, now)
        if now < record.refused_until:
            raise Poisonous
        if not record.suspected:
            avoid = frozenset(key for keys in record.failed.values() for key in keys)
            return Where(avoid=avoid) if avoid else None
        if record.at is not None:  # a copy of the request is being tried
            raise self._hold(record)
        late = record.held_since is not None and now - record.held_since > self.settings.alone_s
        return Where(avoid=self._records.tried_at(), waits=not late or record.together)

    def _judge_falls(self, request: GenerationRequest, record: Record, now: float) -> None:
        """Declare a request poisonous if enough workers died while requests with the same fingerprint ran on them.

        Raise Held if the last death was less than SETTLED_S ago.
        """
        falls, settings = record.fell.values(), self.settings
        if now - max(fall.at for fall in falls) < SETTLED_S:
            raise self._hold(record)
        suspicious = len(falls) + min(record.refusals, 1)
        if not record.together and suspicious > 1 + self._other_falls(now):
            reasons = [fall.reason for fall in falls]
            refused_s = settings.failed_s if STUCK in reasons else settings.refused_s
            self._condemn(request, record, reasons[0], dict.fromkeys(record.fell, 0), refused_s)

    def hold(self, request: GenerationRequest) -> Held:
        """Return the error for a request that has to wait, because no worker permitted for it is available."""
        return self._hold(self._records.of(request))

    def _hold(self, record: Record | None) -> Held:
        """Record that a request has to wait, and return the error for it."""
        self._held = True
        if record is not None and record.held_since is None:
            record.held_since = self._now()
        return Held()

    # --- the course of a request ----------------------------------------------------------------------------

    def sent(self, request: GenerationRequest, endpoint: Endpoint, slot: int) -> None:
        """Record that a request was sent to a worker. `slot` is the attempt's number in `ActiveSequences`."""
        records, sketch = self._records, request.names.sketch
        record = records.of(request) if records else None
        if record is not None and record.suspected:
            others = any(one.at is endpoint for one in records.values() if one is not record)
            record.at, record.slot, record.alone, record.held_since = endpoint, slot, not others, None
        elif sketch not in records.proven:
            for suspect in records.values():
                if suspect.at is endpoint:
                    suspect.alone = False  # the cause of a death would be ambiguous now
            flight = self._flights.get(sketch)
            if flight is not None and flight.endpoint is endpoint:
                flight.slots.add(slot)
            elif flight is None and len(self._flights) < FLIGHTS_MAX:
                self._flights[sketch] = Flight(endpoint, {slot})

    def read(self, request: GenerationRequest, key: Key) -> None:
        """Record that a request has produced a token on a worker.

        This proves requests with the same fingerprint harmless.
        """
        self.breakers.outcomes(key).worked_at = self._now()
        records, sketch = self._records, request.names.sketch
        if records and (record := records.of(request)) is not None:
            record.fell, record.together, record.at, record.slot, record.refusals = {}, False, None, 0, 0
            if not record.failed:
                records.forget(record)
        self._flights.pop(sketch, None)
        if sketch not in records.proven:
            records.proven[sketch] = None
            if len(records.proven) > PROVEN_MAX:
                records.proven.popitem(last=False)
        self._found_out()

    def served(self, request: GenerationRequest) -> None:
        """Record that a request was completed, and drop the evidence against its fingerprint."""
        if self._records and (record := self._records.of(request)) is not None:
            self._records.forget(record)

    def left(self, request: GenerationRequest, slot: int) -> None:
        """Record that an attempt no longer runs, whatever its outcome.

        `slot` is the attempt's number in `ActiveSequences`.
        """
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
        """Record that a worker died before this request had produced a token on it. This makes the request a suspect."""
        record, key = self._records.keep(fingerprint(request)), endpoint.key
        record.together = bool(record.fell) and not (record.slot == slot and record.alone)
        known = key in record.fell
        record.fell[key] = Fall(self._now(), reason)
        if known:
            return
        fact = RequestSuspected(
            worker=endpoint.worker,
            instance=endpoint.instance,
            frontend=self.frontend,
            request=request.id,
            model=request.model,
            fingerprint=record.fingerprint,
            reason=reason,
            prompt_tokens=len(request.prompt),
        )
        self.observe(fact, traceparent=request.traceparent)

    def fell_by_itself(self, key: Key, reason: str) -> None:
        """Record that a worker died while running a request that had already produced a token on it."""
        if key not in self._fallen and len(self._fallen) >= self.settings.records_max:
            del self._fallen[next(iter(self._fallen))]
        self._fallen[key] = Fall(self._now(), reason)

    def _other_falls(self, now: float) -> int:
        """Return how many workers died recently while no unproven request ran on them.

        A request is unproven until it has produced a token. The result is at most OTHER_FALLS_MAX.
        """
        self._fallen = {key: fall for key, fall in self._fallen.items() if now - fall.at < OTHER_FALLS_S}
        suspected = {key for record in self._records.values() for key in record.fell}
        others = (
            key
            for key, fall in self._fallen.items()
            if key not in suspected and counts_still(key, fall, now, self.settings, self.links)
        )
        return min(sum(1 for _ in others), OTHER_FALLS_MAX)

    def brings_down(self, reason: str, key: Key, *, one_stream: bool, connected: bool) -> bool:
        """Return whether a failure means that the worker died.

        `one_stream` states that only this request's stream stalled. `connected` states that the worker still reports
        its load.
        """
        if reason != STUCK:
            return reason in FALLS
        worked_at = self.breakers.outcomes(key).worked_at
        worked = worked_at is not None and self._now() - worked_at <= WORKED_S
        return connected and not one_stream and worked

    def failed(self, request: GenerationRequest, key: Key, way: "Way", routed_under: int) -> Suspicion:
        """Record that a request failed on a worker that kept running. `way` is the kind of failure.

        Return `Suspicion.POISONOUS` if the request is poisonous now, otherwise `Suspicion.NONE`.
        """
        record = self._records.keep(fingerprint(request))
        there = record.failed.setdefault(way, {})
        there[key] = routed_under
        everywhere = len({worker for worker, _ in there}) > 1
        if not everywhere or any(self.breakers.outcomes(key).fails_others for key in there):
            return Suspicion.NONE
        self._condemn(request, record, way.reason, there, self.settings.failed_s)
        return Suspicion.POISONOUS

    def repeats(self, request: GenerationRequest, key: Key, way: "Way") -> bool:
        """Return whether a request with this fingerprint has failed on this worker before, in the same way.

        When a request with this fingerprint is completed, all failures before are forgotten. A repeated failure is no
        further evidence against the worker.
        """
        record = self._records.of(request)
        return record is not None and key in record.failed.get(way, ())

    def _condemn(
        self, request: GenerationRequest, record: Record, reason: str, where: dict[Key, int], refused_s: float
    ) -> None:
        """Declare a request poisonous: refuse its fingerprint for a while, and report it.

        `where` maps each worker on which the request failed to its `routed_under`, or to 0 if the worker died. The
        request's last failure on each of these workers no longer counts against the worker. `refused_s` is the duration
        of the first refusal; each further refusal lasts twice as long, up to a limit.
        """
        wait_s = min(refused_s * 2.0 ** min(record.refusals, 20), self.settings.refused_s_max)
        record.refusals += 1
        record.refused_until = self._now() + wait_s
        guided = next(iter(request.guided), "") if request.guided else ""
        for (worker, instance), routed_under in where.items():
            self._fallen.pop((worker, instance), None)  # the cause of this death is known now
            outcomes = self.breakers.outcomes((worker, instance))
            outcomes.take_back(one_stream=reason == STUCK and not record.fell)
            fact = RequestPoisonous(
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
            )
            self.observe(fact, traceparent=request.traceparent)
        log.warning("request_poisonous", request=request.id, reason=reason, refused_s=wait_s,
                    workers=[worker for worker, _ in where])  # fmt: skip
        record.fell, record.failed = {}, {}
        self._found_out()

    # --- reports of other frontends -------------------------------------------------------------------------

    def apply_report(self, fact: RequestSuspected | RequestPoisonous, age_s: float) -> None:
        """Apply a report that another frontend has published, or this frontend before its restart.

        `age_s` is the report's age in seconds.
        """
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


def fingerprint(request: GenerationRequest) -> str:
    """Return 32 hexadecimal digits that identify a request's model, prompt and output constraint.

    The client does not matter. The first 16 digits are the prompt's `sketch` (a short hash), the others are 64 bits of
    BLAKE2b. The prompt cannot be recovered from a fingerprint, but a guess of the whole prompt can be confirmed.
    """
    about = json.dumps([request.model, request.guided], sort_keys=True, default=str)
    exact = blake2b(about.encode(), digest_size=8)
    exact.update(array("Q", request.prompt).tobytes())
    return f"{request.names.sketch & SKETCH_MASK:016x}{exact.hexdigest()}"


def sketch_of(fingerprint: str) -> int:
    """Return the sketch (short hash of the prompt) in a fingerprint. Raise ValueError if the fingerprint is invalid."""
    if len(fingerprint) != 32:
        raise ValueError("a fingerprint has 32 digits")
    found = int(fingerprint[:16], 16)
    return found - SKETCH_MASK - 1 if found >> 63 else found
