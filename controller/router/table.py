"""Who could serve a request? The router's table: one seat per life of a worker, kept from the fold.

A seat says what the fleet thinks of a worker (weight, health) and what this frontend has in flight there.
Lineage is what must stay the same over a request's life: the revision of the weights, and the tokenizer.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from controller.deciders.degradation import Degradation
from controller.deciders.fleet import Fleet, Worker
from events.decisions import HealthStatus, Knobs
from events.observations import WorkerJoined

Key = tuple[str, str]  # worker, instance
Lineage = tuple[str, str]  # revision, tokenizer

_USUAL = Knobs()
RANKS_MAX = 1024  # DP ranks of a worker that are looked at, whatever it registers


class Holder(NamedTuple):
    """One DP rank of one life of a worker: what has a KV cache of its own."""

    worker: str
    instance: str
    rank: int = 0


@dataclass(slots=True, eq=False)
class Seat:
    """One life of a worker, as a place for requests."""

    joined: WorkerJoined
    weight: float = 0.0
    status: HealthStatus = HealthStatus.SUSPICIOUS
    corrupt: bool = False
    cache_epoch: int = 0
    expected: bool = False  # in service, or should be: it counts when a frontend asks whether there is panic
    active: int = 0  # requests of this frontend in flight there
    promised: int = 0  # requests that were let in for it, whose prompts are still being read
    tokens: int = 0  # their prompt tokens and what they may still generate
    flights: dict[Any, None] = field(default_factory=dict)  # in the order of their arrival
    worker: str = field(init=False)
    instance: str = field(init=False)
    model: str = field(init=False)
    ranks: int = field(init=False)
    max_batch: int = field(init=False)
    block_tokens: int = field(init=False)  # 1 of who registers nonsense
    key: Key = field(init=False)
    lineage: Lineage = field(init=False)

    def __post_init__(self) -> None:
        joined = self.joined  # a life registers once: what a choice asks of every seat is read from it once
        self.worker, self.instance = self.key = joined.worker, joined.instance
        self.model = joined.model
        self.ranks = min(max(1, joined.dp), RANKS_MAX)
        self.max_batch = joined.profile.max_batch
        self.block_tokens = max(1, joined.profile.block_tokens)
        self.lineage = joined.revision, joined.tokenizer

    @property
    def routable(self) -> bool:
        """Whether the fleet lets requests go there."""
        return self.weight > 0.0

    def shown(self, reachable: bool) -> dict[str, object]:
        """Return what a person may want to know of it."""
        return {
            "id": self.worker,
            "instance": self.instance,
            "model": self.joined.model,
            "health": self.status.value,
            "weight": self.weight,
            "reachable": reachable,
            "in_flight": self.active,
        }


@dataclass(frozen=True, slots=True)
class Kin:
    """The workers of one model and lineage, of which there is at least one, and what they have in common."""

    seats: tuple[Seat, ...]
    context_tokens: int  # the fewest of all
    engine: str
    text_only: bool  # some of them give text and no tokens
    block_sizes: tuple[int, ...]  # tokens of their KV blocks, the size of most of them first

    @classmethod
    def of(cls, seats: Sequence[Seat]) -> "Kin":
        """Look at all of them."""
        joined = [seat.joined for seat in seats]
        sizes = Counter(max(1, one.profile.block_tokens) for one in joined)
        return cls(
            tuple(seats),
            min(one.context_tokens for one in joined),
            joined[0].engine,
            any(one.engine == "openai" and not one.exact for one in joined),
            tuple(size for size, _ in sizes.most_common()),
        )


@dataclass(slots=True)
class Change:
    """What one absorbed state has changed in the table."""

    updated: list[tuple[Seat, Worker]] = field(default_factory=list)
    moved: bool = False  # one of these may get more or less than before, or what it runs shall go
    joined: int = 0
    left: bool = False
    knobs: bool = False

    def __bool__(self) -> bool:
        return self.moved or self.left or self.knobs


class Table:
    """All seats, by key and by model."""

    def __init__(self) -> None:
        self.seats: dict[Key, Seat] = {}
        self.models: dict[str, list[Seat]] = {}
        self.number = 0  # of the last decision that this table reflects
        self.known: set[str] = set()  # every model that a worker was ever known to serve
        self._known: Mapping[str, Worker] = {}
        self._models: Mapping[str, Degradation] = {}
        self._knobs: dict[str, Knobs] = {}
        self._kin: dict[tuple[str, Lineage], Kin | None] = {}
        self._limits: dict[str, int | None] = {}

    def absorb(self, fleet: Fleet) -> Change:
        """Take the fold's shown state in, and return what has changed by it.

        Workers are compared by identity: a thousand of them cost next to nothing when one has changed.
        """
        change = Change()
        self.number = fleet.number
        if fleet.models is not self._models:
            knobs = {model: degradation.knobs for model, degradation in fleet.models.items()}
            change.knobs, self._knobs, self._models = knobs != self._knobs, knobs, fleet.models
        if fleet.workers is self._known:
            return change
        known, self._known = self._known, fleet.workers
        for name, worker in fleet.workers.items():
            if known.get(name) is not worker:
                self._update(worker, known.get(name), change)
        if len(fleet.workers) < len(known) + change.joined:
            change.left = True
        if change.left or change.joined:
            self._replace(seat for seat in self.seats.values() if self._lives(seat))
        return change

    def _update(self, worker: Worker, before: Worker | None, change: Change) -> None:
        """Bring one seat up to date. A convicted worker gets nothing from the moment the evidence is seen: the decision
        that follows is certain, but takes a while, and a controller that lives."""
        key = (worker.joined.worker, worker.joined.instance)
        self.known.add(worker.joined.model)
        seat = self.seats.get(key)
        change.left = change.left or (before is not None and before.joined.instance != key[1])
        if seat is None:
            if not worker.alive:
                return
            seat = self.seats[key] = Seat(worker.joined, corrupt=worker.health.corrupt)
            change.joined += 1
        change.left = change.left or not worker.alive
        standing = (seat.status, seat.corrupt, seat.expected, seat.weight)
        seat.status = worker.health.status
        seat.corrupt = worker.health.corrupt
        seat.cache_epoch = worker.cache_epoch
        seat.expected = worker.expected
        seat.weight = 0.0 if seat.corrupt or worker.health.accused else worker.weight
        change.moved = (
            change.moved
            or before is None
            or standing != (seat.status, seat.corrupt, seat.expected, seat.weight)
            or before.drain != worker.drain
            or before.health.limits != worker.health.limits
        )
        change.updated.append((seat, worker))

    def worker(self, seat: Seat) -> Worker | None:
        """Return what the fold shows of a seat's life; None if it is over."""
        worker = self._known.get(seat.worker)
        same = worker is not None and worker.alive and worker.joined.instance == seat.instance
        return worker if same else None

    def drains(self, seat: Seat) -> bool:
        """Return whether the fleet drains a seat's life. The worker may not have been told yet."""
        worker = self.worker(seat)
        return worker is not None and worker.drain.active

    @property
    def workers(self) -> Iterable[Worker]:
        """Every worker that the fold knows, the dead ones too."""
        return self._known.values()

    def _lives(self, seat: Seat) -> bool:
        return self.worker(seat) is not None

    def set_static(self, joined: Iterable[WorkerJoined]) -> None:
        """Make the table of workers that were given directly: all of them HEALTHY."""
        fresh = []
        for fact in joined:
            seat = self.seats.get((fact.worker, fact.instance)) or Seat(fact)
            seat.weight, seat.status, seat.expected = 1.0, HealthStatus.HEALTHY, True
            self.known.add(fact.model)
            fresh.append(seat)
        self._replace(fresh)

    def knobs(self, model: str) -> Knobs:
        """Return the knobs of a model's degradation level."""
        return self._knobs.get(model, _USUAL)

    def kin(self, model: str, lineage: Lineage) -> Kin | None:
        """Return a model's workers of one lineage; None if there are none. Each request asks several times, before a thousand
        of them: it is the same one until a worker joins or is gone."""
        name = (model, lineage)
        kin = self._kin.get(name)
        if kin is None and name not in self._kin:
            seats = [seat for seat in self.models.get(model, ()) if seat.lineage == lineage]
            kin = self._kin[name] = Kin.of(seats) if seats else None
        return kin

    def migration_limit(self, model: str) -> int | None:
        """Return the smallest limit that a worker of this model has registered; None if none has."""
        if model not in self._limits:
            limits = (seat.joined.migration_limit for seat in self.models.get(model, ()))
            self._limits[model] = min((limit for limit in limits if limit is not None), default=None)
        return self._limits[model]

    def _replace(self, seats: Iterable[Seat]) -> None:
        self.seats = {seat.key: seat for seat in seats}
        self.models = {}
        self._kin.clear()
        self._limits.clear()
        for seat in self.seats.values():
            self.models.setdefault(seat.joined.model, []).append(seat)
