"""Histories for tests: a fleet with generated facts and real decisions on a MemoryStream.

Decisions come from the real deciders, based on what the controller had read: `decide(lag=2)` simulates a controller
with an append that lost the race against two observations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import nats
from memory_journal import MemoryStream
from nats.aio.client import Client

from controller.deciders.fleet import Fleet, FleetPolicy, evolve, settle
from events import codec, subjects
from events import observations as o
from events.decisions import Absorbed
from events.fact import Decision, Fact, Observation, Recorded
from events.journal import messages
from events.order import Order

EPOCH = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
PROFILE = o.Profile(
    kv_blocks=1000,
    block_tokens=16,
    max_batch=16,
    prefill_tokens_per_s=5000.0,
    tpot_ms=((1, 10.0), (16, 20.0)),
)


@dataclass
class History:
    """A fleet that tests drive by hand. Every fact is a second after the last one."""

    policy: FleetPolicy = field(default_factory=FleetPolicy)
    now: datetime = EPOCH
    stream: MemoryStream = field(default_factory=MemoryStream)
    numbers: dict[str, int] = field(default_factory=dict)
    _folded: Order[Fleet] = field(default_factory=lambda: Order(evolve, Fleet()))

    def __post_init__(self) -> None:
        self.stream.clock = lambda: self.now

    @property
    def events(self) -> list[Recorded]:
        return self.stream.events

    def order(self, until: int | None = None) -> Order[Fleet]:
        """Return the fold up to a sequence."""
        order: Order[Fleet] = Order(evolve, Fleet())
        for event in self.events[:until]:
            order.take(event)
        return order

    @property
    def latest(self) -> Order[Fleet]:
        """Return the fold of everything so far."""
        for event in self.events[self._folded.last_seq :]:
            self._folded.take(event)
        return self._folded

    @property
    def fleet(self) -> Fleet:
        """Return the shown state."""
        return self.latest.shown

    def say(self, *facts: Observation, source: str = "test-1", seconds: float = 1.0) -> list[str]:
        """Observe facts and return their ids."""
        ids = []
        for fact in facts:
            self.now += timedelta(seconds=seconds)
            self.numbers[source] = self.numbers.get(source, 0) + 1
            ids.append(codec.new_id())
            self._add(fact, id=ids[-1], source=source, source_number=self.numbers[source])
        return ids

    def _add(self, fact: Fact, *, id: str, source: str, source_number: int, **more: object) -> None:
        headers = codec.encode_headers(
            fact,
            id=id,
            source=source,
            source_number=source_number,
            said_at=self.now,
            **more,  # type: ignore[arg-type]
        )
        self.stream.add(fact, headers)
        self.stream.wake()

    def repeat(self, event: Recorded) -> None:
        """Publish a fact a second time, as after a lost acknowledgement and an expired deduplication window."""
        again = replace(event, seq=len(self.events) + 1, at=self.now)
        self.stream.events.append(again)

    def append(self, decisions: Sequence[Decision], *, through: int) -> None:
        """Write decisions as one batch."""
        for decision in decisions:
            id = codec.new_id()
            self._add(
                decision, id=id, source="controller-1", source_number=0, through=through,
                correlation=decision.incident, causation=decision.cause,
            )  # fmt: skip

    def decide(self, *, lag: int = 0, seconds: float = 0.0) -> tuple[Decision, ...]:
        """Decide on everything but the last `lag` events, and append what is due."""
        self.now += timedelta(seconds=seconds)
        through = len(self.events) - lag
        read = self.order(through) if lag else self.latest
        decided = settle(self.policy, read.shown, self.now)
        self.append(decided, through=through)
        return decided

    def absorb(self) -> None:
        """Append that nothing was due."""
        number = self.latest.position.number + 1
        self.append([Absorbed(number=number, decided_at=self.now)], through=len(self.events))

    # --- facts ------------------------------------------------------------------------------------------------------

    def joined(self, worker: str, instance: str = "") -> o.WorkerJoined:
        """Return a worker's registration."""
        return o.WorkerJoined(
            worker=worker, instance=instance or f"{worker}-a", url="tcp://127.0.0.1:1", model="llama", revision="r1",
            tokenizer="builtin:sim", engine="simulated", engine_version="1", dtype="f32", tp=1, device="cpu",
            profile=PROFILE, canary_key="key", pid=4242,
        )  # fmt: skip

    def passed(
        self, worker: str, instance: str = "", canary: str = "c0", check: str = "scheduled"
    ) -> o.CanaryPassed:
        """Return a successful probe."""
        return o.CanaryPassed(
            worker=worker, instance=instance or f"{worker}-a", canary_key="key", canary=canary, check_type=check,  # type: ignore[arg-type]
            sent_under=self.latest.position.number, sent_at=self.now, latency_ms=12.0,
        )  # fmt: skip

    def failed(
        self, worker: str, instance: str = "", *, confirmed: bool = False, reason: str = "timeout"
    ) -> o.CanaryFailed:
        """Return a failed probe."""
        return o.CanaryFailed(
            worker=worker, instance=instance or f"{worker}-a", canary_key="key", canary="c0", check_type="scheduled",
            sent_under=self.latest.position.number, sent_at=self.now, latency_ms=12.0, reason=reason,  # type: ignore[arg-type]
            confirmed=confirmed, golden="agreed", expected=(300, 301, 302), got=(300, 999, 302),
        )  # fmt: skip

    def migrated(self, request: str, source: str, target: str) -> o.RequestMigrated:
        """Return a request's move."""
        return o.RequestMigrated(
            frontend="frontend-0", request=request, model="llama", source=source, source_instance=f"{source}-a",
            target=target, target_instance=f"{target}-a", cause="unhealthy", method="reprefill", tokens=17, gap_ms=31.5,
            attempt=2, exact=True,
        )  # fmt: skip

    def exposed(self, request: str, worker: str) -> o.RequestExposed:
        """Return a request's exposure to a convicted worker."""
        return o.RequestExposed(
            frontend="frontend-0", request=request, model="llama", worker=worker, instance=f"{worker}-a", first=3, last=19,
            finished=False, action="continue",
        )  # fmt: skip

    # --- complete scenarios -----------------------------------------------------------------------------------------

    def start(self, workers: int = 3) -> "History":
        """Let workers join and become healthy."""
        names = [f"w{n}" for n in range(workers)]
        self.say(*(self.joined(name) for name in names))
        self.decide()
        self.say(*(self.passed(name, check="join") for name in names))
        self.decide()
        return self

    def corruption(self, worker: str = "w2") -> "History":
        """Convict a worker, move its requests, and let the worker recover."""
        self.say(self.failed(worker, confirmed=True, reason="token_mismatch"))
        self.decide()
        self.say(self.migrated("req-1", worker, "w0"), self.exposed("req-1", worker), source="frontend-0")
        self.decide(seconds=61)  # the breaker half-opens
        self.say(self.passed(worker, check="trial"))
        self.decide()
        for _ in range(4):
            self.say(self.passed(worker))
            self.decide()
        return self

    def recovery(self, worker: str = "w2") -> "History":
        """Let a recovered worker answer until the incident is closed."""
        for _ in range(6):
            self.say(self.passed(worker))
            self.decide(seconds=30)
        return self


async def publish(url: str, events: Sequence[Recorded]) -> int:
    """Publish a generated history to a real stream unchanged, and return the last sequence."""
    client = await nats.connect(url)
    try:
        decided = await _last_decided(client)
        for event in events:
            headers = codec.encode_headers(
                event.fact, id=event.id, source=event.source, source_number=event.source_number,
                said_at=event.said_at or event.at, through=event.through or None, causation=event.causation,
                correlation=event.correlation,
            )  # fmt: skip
            body = codec.encode_body(event.fact)
            if isinstance(event.fact, Decision):
                headers |= messages.fence(decided)
            ack = await client.jetstream().publish(subjects.subject(event.fact), body, headers=headers)
            decided = ack.seq if isinstance(event.fact, Decision) else decided
        return ack.seq
    finally:
        await client.close()


async def _last_decided(client: Client) -> int:
    try:
        return int((await client.jetstream().get_last_msg(subjects.STREAM, subjects.DECIDED_ALL)).seq or 0)
    except nats.js.errors.NotFoundError:
        return 0
