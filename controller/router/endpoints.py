"""The endpoint table of a router: one endpoint per worker instance, updated from the fleet state.

An endpoint combines the fleet's view of a worker (weight, health) with this frontend's requests in flight on the
worker. The lineage of a worker is what must not change during a request: the revision of the weights, and the
tokenizer.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from controller.deciders import thresholds
from controller.deciders.capacity import Slo, slo_of
from controller.deciders.degradation import Degradation
from controller.deciders.fleet import AwaitedWorker, Fleet, Worker
from controller.deciders.thresholds import NEVER, BusyThresholds
from controller.deciders.tiers import Tiers
from events.decisions import HealthStatus, Knobs
from events.intrusion.registration import impossible
from events.observations import BusyThresholdsSet, WorkerJoined
from events.proxied_paths import COMPLETIONS
from events.wire import Load

Key = tuple[str, str]  # worker, instance
Lineage = tuple[str, str]  # revision, tokenizer

_USUAL = Knobs()
ANY_NUMBER = 1 << 30  # limit of requests for a worker that registers no limit
RANKS_MAX = 1024  # largest number of DP ranks per worker, whatever the worker registers


class ConnectedWorkers(Protocol):
    """The connection layer's view of workers. By default all workers are reachable and report no load.

    No method blocks.
    """

    def reachable(self, worker: str, instance: str) -> bool:
        """Return whether this instance is connected, and its engine is not known to be stuck."""
        return True

    def recently_heard(self, worker: str, instance: str) -> bool:
        """Return whether this instance is reachable and has sent a message as recently as a live worker would."""
        return True

    def load(self, worker: str) -> Load | None:
        """Return the worker's last reported load, or None if the worker is not connected."""
        return None

    def load_by_rank(self, worker: str) -> Sequence[Load]:
        """Return the last reported load of each DP rank of the worker, or () if the worker is not connected."""
        return ()

    def external_load(self, worker: str) -> Load | None:
        """Return the worker's load from requests that are not this frontend's, or None if the worker is not connected."""
        return None

    def external_load_by_rank(self, worker: str) -> Sequence[Load]:
        """Return the load of each DP rank from requests that are not this frontend's.

        Return () if the worker has one rank, or does not report the load of its ranks.
        """
        return ()


class WorkerRank(NamedTuple):
    """One DP (data-parallel) rank of a worker instance. Each rank has its own KV cache."""

    worker: str
    instance: str
    rank: int = 0


class Server(NamedTuple):
    """The properties of a worker instance that determine whether it continues an answer with the same tokens."""

    key: Key
    exact: bool = True  # whether it accepts and returns token ids
    root: str = ""  # the weights that it serves
    generation_config: str = ""  # default sampling parameters of its server


@dataclass(slots=True)
class KeptRoom:
    """A worker's capacity that is reserved for admitted requests until they are sent.

    A request adds 0 to `tokens` or `blocks` if its size is unknown.
    """

    requests: int = 0
    tokens: int = 0  # prompt tokens to prefill
    blocks: float = 0.0  # KV blocks that the requests will use


@dataclass(slots=True, eq=False)
class Endpoint:
    """A worker instance to which requests can be sent.

    Only its own methods (`admit`, `begin` and the like) change its counters (`active`, `kept`, `tokens`). Each sender
    of requests calls these methods; other code only reads the counters.
    """

    joined: WorkerJoined
    weight: float = 0.0
    status: HealthStatus = HealthStatus.SUSPICIOUS
    corrupt: bool = False  # whether canaries convict the worker
    # why the worker is convicted, if it serves nevertheless as the last worker of its model; otherwise empty
    suspect: str = ""
    cache_epoch: int = 0
    # whether the worker is in service, or should be; a frontend counts such workers when it checks for panic
    expected: bool = False
    active: int = 0  # requests of this frontend in flight on the worker
    kept: KeptRoom = field(default_factory=KeptRoom)
    # tokens of requests in flight: the sum of prompt lengths and of the largest permitted answer lengths
    tokens: int = 0
    # The external load that the worker had reported when it last rejected a request because it was full. The worker
    # counts as full until its next report.
    refused_at: Load | None = None
    worker: str = field(init=False)
    instance: str = field(init=False)
    model: str = field(init=False)
    ranks: int = field(init=False)
    max_batch: int = field(init=False)
    # largest number of requests at the worker, by its registration; never exceeded
    holds: int = field(init=False)
    block_tokens: int = field(init=False)  # 1 if it registers an invalid value
    adapters: frozenset[str] = field(init=False)  # LoRA adapters that the worker has now
    # for prompt and answer together; 0 if the registration is impossible
    context_tokens: int = field(init=False)
    key: Key = field(init=False)
    holders: tuple[WorkerRank, ...] = field(init=False)  # its DP ranks
    lineage: Lineage = field(init=False)  # revision and tokenizer, which must not change during a request
    server: Server = field(init=False)
    generates: bool = field(init=False)  # whether it generates tokens, and not only vectors or scores

    def __post_init__(self) -> None:
        # a registration never changes, so the values that every choice reads are copied from it
        joined = self.joined
        self.worker, self.instance = self.key = joined.worker, joined.instance
        self.model = joined.model
        self.lineage = joined.revision, joined.tokenizer
        self.server = Server(self.key, joined.exact, joined.root, joined.generation_config)
        self.ranks = min(max(1, joined.dp), RANKS_MAX)
        self.holders = tuple(WorkerRank(*self.key, rank) for rank in range(self.ranks))
        self.max_batch = joined.profile.max_batch
        waiting = joined.waiting_max
        self.holds = ANY_NUMBER if waiting is None else max(1, self.max_batch + waiting)
        self.block_tokens = max(1, joined.profile.block_tokens)
        self.generates = not joined.paths or COMPLETIONS in joined.paths
        self.context_tokens = 0 if impossible(joined) else joined.context_tokens
        self.adapters = frozenset(joined.adapters)

    @property
    def standing(self) -> tuple[object, ...]:
        """The fleet's verdict on the endpoint (status, convictions, weight), to detect changes."""
        return self.status, self.corrupt, self.suspect, self.expected, self.weight

    @property
    def routable(self) -> bool:
        """Whether the fleet allows requests to this worker."""
        return self.weight > 0.0

    def has(self, adapter: str) -> bool:
        """Return whether the worker has this LoRA adapter now. Every worker has the empty one, which is its model alone."""
        return not adapter or adapter in self.adapters

    # --- this frontend's requests on the worker: only these methods write its counters

    def admit(self, tokens: int = 0, blocks: float = 0.0) -> None:
        """Reserve capacity for one request until `release`: its prompt tokens to prefill and its KV blocks."""
        self.kept.requests += 1
        self.kept.tokens += tokens
        self.kept.blocks += blocks

    def release(self, tokens: int = 0, blocks: float = 0.0) -> None:
        """Release the capacity reserved by `admit` for one request, with the same `tokens` and `blocks`."""
        self.kept.requests -= 1
        self.kept.tokens -= tokens
        self.kept.blocks = self.kept.blocks - blocks if self.kept.requests else 0.0

    def begin(self, tokens: int = 0, *, requests: int = 1) -> None:
        """Add sent requests to this endpoint's counters. `tokens` is the sum of their prompt lengths and token limits."""
        self.active += requests
        self.tokens += tokens

    def end(self, tokens: int = 0, *, requests: int = 1) -> None:
        """Subtract requests that no longer run here from this endpoint's counters, with the same `tokens` as in `begin`."""
        self.active -= requests
        self.tokens -= tokens

    def shown(self, reachable: bool) -> dict[str, object]:
        """Return the endpoint's state for display, as JSON."""
        return {
            "id": self.worker,
            "instance": self.instance,
            "model": self.joined.model,
            "health": self.status.value,
            "weight": self.weight,
            "reachable": reachable,
            "in_flight": self.active,
            "suspect": self.suspect or None,
        }


def most_common_value(claims: Sequence[int]) -> int:
    """Return the most frequent value. In a tie, return the largest of the tied values.

    Each claim counts as one vote for its value.
    """
    counts = Counter(claims)
    return max(counts, key=lambda value: (counts[value], value))


def confirmed(claims: Iterable[tuple[int, str]]) -> int:
    """Return the largest value that workers of at least two broker accounts support.

    `claims` contains each worker's value and account. A worker supports every value up to the one that it claims. If all
    claims are from one account, return the largest claimed value. Otherwise no single account can raise the result.
    """
    most: dict[str, int] = {}
    for value, account in claims:
        most[account] = max(value, most.get(account, value))
    return sorted(most.values(), reverse=True)[:2][-1]


def shown_context(endpoints: Iterable[Endpoint]) -> int:
    """Return the context length that clients are shown: the largest that two broker accounts support (`confirmed`)."""
    return confirmed((one.context_tokens, one.joined.account or one.worker) for one in endpoints)


@dataclass(frozen=True)
class EndpointGroup:
    """The workers (at least one) of one model and lineage (revision and tokenizer), with the limits of a request.

    The limits are computed from the registrations of the workers that may currently get requests, or of all workers if no
    worker may. Each limit is the largest or the most frequent value, so that no single registration narrows it.
    """

    endpoints: tuple[Endpoint, ...]
    # the largest context; a request is sent only to a worker with a context that holds it
    context_tokens: int
    engine: str  # the most frequent engine
    text_only: bool  # whether most of the workers return text and no tokens
    block_sizes: tuple[int, ...]  # tokens per KV block, the most frequent size first
    # the most frequent context in tokens, which applies if a request sets no `max_tokens`
    usual_context: int = 0
    shown_context: int = 0  # in tokens, for display to clients; no single claim raises it

    @cached_property
    def keys(self) -> frozenset[Key]:
        """The keys of the group's endpoints."""
        return frozenset(endpoint.key for endpoint in self.endpoints)

    @classmethod
    def of(cls, endpoints: Sequence[Endpoint]) -> "EndpointGroup":
        """Build a group of these endpoints, with limits from the registrations of the routable ones."""
        voters = [endpoint for endpoint in endpoints if endpoint.routable] or list(endpoints)
        joined = [endpoint.joined for endpoint in voters]
        sizes = Counter(endpoint.block_tokens for endpoint in endpoints)
        return cls(
            tuple(endpoints),
            max(endpoint.context_tokens for endpoint in voters),
            Counter(one.engine for one in joined).most_common(1)[0][0],
            most_common_value([int(one.engine == "openai" and not one.exact) for one in joined]) > 0,
            tuple(size for size, _ in sizes.most_common()),
            most_common_value([endpoint.context_tokens for endpoint in voters]),
            shown_context(voters),
        )

    def answer_room(self, prompt_tokens: int) -> int:
        """Return the largest number of answer tokens for a prompt of `prompt_tokens` tokens if the client sets no limit."""
        room = self.usual_context - prompt_tokens
        return room if room > 0 else self.context_tokens - prompt_tokens


@dataclass(slots=True)
class TableChange:
    """The changes of an endpoint table in one update from the fleet state."""

    updated: list[tuple[Endpoint, Worker]] = field(default_factory=list)
    # whether an endpoint may now get more or fewer requests, or whether its requests have to move
    moved: bool = False
    joined: int = 0
    left: bool = False
    knobs: bool = False
    adapters: bool = False  # whether a worker has loaded or unloaded an adapter

    def __bool__(self) -> bool:
        return self.moved or self.left or self.knobs or self.adapters


def adapters_of(endpoints: Iterable[Endpoint], models: Container[str]) -> dict[str, list[Endpoint]]:
    """Return the workers that have each LoRA adapter, by the adapter's name.

    All workers of an adapter have one model: the one with the most such workers, or the first by name. Adapters with the name
    of a model in `models` are left out, because the model has precedence.
    """
    found: dict[str, dict[str, list[Endpoint]]] = {}
    for endpoint in endpoints:
        for adapter in endpoint.adapters:
            if adapter not in models:
                found.setdefault(adapter, {}).setdefault(endpoint.model, []).append(endpoint)
    return {
        adapter: min(by_model.items(), key=lambda one: (-len(one[1]), one[0]))[1]
        for adapter, by_model in found.items()
    }


class EndpointTable:
    """All endpoints of a frontend, by key and by model, with the settings of each model from the fleet state.

    A LoRA adapter is served under its own name, by those workers of its model that have it now. Methods with the parameter
    `served` accept the name of a model or of an adapter.
    """

    def __init__(self, allows: Callable[[WorkerJoined], bool] = lambda joined: True) -> None:
        """Create an empty table. A worker that `allows` rejects gets no endpoint."""
        self._allows = allows
        self.endpoints: dict[Key, Endpoint] = {}
        self.models: dict[str, list[Endpoint]] = {}
        self.adapters: dict[str, list[Endpoint]] = {}  # by adapter: the workers of its model that have it now
        self.further: dict[str, str] = {}  # a model by each further name that its workers' servers register
        self.number = 0  # number of the last decision that this table reflects
        # every model that a worker in the fold serves or served, or that an awaited worker will serve
        self.known = set[str]()
        self.tiers = Tiers()
        self.thresholds: Mapping[str, BusyThresholds] = {}  # by model, as operators have set them
        self.unnamed: tuple[str, ...] = ()  # awaited workers that have not reported a model
        self._known: Mapping[str, Worker] = {}
        self._departed: Mapping[str, Worker] = {}
        self._awaited: Mapping[str, AwaitedWorker] = {}
        self._models: Mapping[str, Degradation] = {}
        self._policy: Mapping[str, Any] | None = None
        self._slos: dict[str, Slo] = {}  # by model, from that policy
        self._thresholds: Mapping[str, BusyThresholds] = {}
        self._knobs: dict[str, Knobs] = {}
        self._group: dict[tuple[str, Lineage], EndpointGroup | None] = {}
        self._limits: dict[str, int | None] = {}

    def absorb(self, fleet: Fleet) -> TableChange:
        """Update the table to this fleet state. Return what has changed.

        Workers are compared by identity, so an update with one changed worker in a thousand is cheap.
        """
        change = TableChange()
        self.number = fleet.number
        self._absorb_settings(fleet, change)
        self._departed = fleet.departed
        if fleet.awaited is not self._awaited:
            self._awaited = fleet.awaited
            self._update_models(fleet)
        if fleet.workers is self._known:
            return change
        known, self._known = self._known, fleet.workers
        for name, worker in fleet.workers.items():
            if known.get(name) is not worker:
                self._update(worker, known.get(name), change)
        change.left = change.left or len(fleet.workers) < len(known) + change.joined
        if change.left:
            self._update_models(fleet)
        if change.left or change.joined:
            self._replace(endpoint for endpoint in self.endpoints.values() if self.worker(endpoint))
        elif change.adapters:
            self._replace(self.endpoints.values())
        elif change.moved:  # the set of routable workers has changed, and their votes determine the limits
            self._group.clear()
            self._limits.clear()
        return change

    def _absorb_settings(self, fleet: Fleet, change: TableChange) -> None:
        """Update the knobs, tiers and thresholds that operators and the controller have set."""
        if fleet.models is not self._models:
            knobs = {model: degradation.knobs for model, degradation in fleet.models.items()}
            change.knobs, self._knobs, self._models = knobs != self._knobs, knobs, fleet.models
        if fleet.policy is not self._policy:
            self._policy, self.tiers = fleet.policy, Tiers.of(fleet.policy)
            self._slos.clear()
        if fleet.thresholds is not self._thresholds:
            self._thresholds = self.thresholds = fleet.thresholds

    def _update_models(self, fleet: Fleet) -> None:
        """Update the names of the models that workers serve or will serve."""
        waiting = fleet.waiting
        self.known = {worker.joined.model for worker in fleet.workers.values()}
        self.known |= {one.model for one in waiting if one.model}
        self.further = {
            name: one.joined.model for one in fleet.workers.values() for name in one.joined.also_served
        }
        self.unnamed = tuple(one.worker for one in waiting if not one.model)

    def _update(self, worker: Worker, before: Worker | None, change: TableChange) -> None:
        """Update the endpoint of one worker from the fleet state.

        If its canaries accuse a worker, it gets no requests from the first evidence on, unless it serves as the last worker of
        its model. The controller decides the same, but later: its decision takes a while and needs a live controller.
        """
        key = (worker.joined.worker, worker.joined.instance)
        self.known.add(worker.joined.model)
        self.further |= dict.fromkeys(worker.joined.also_served, worker.joined.model)
        endpoint = self.endpoints.get(key)
        change.left = change.left or (before is not None and before.joined.instance != key[1])
        if endpoint is None:
            if not worker.alive or not self._allows(worker.joined):
                return
            endpoint = self.endpoints[key] = Endpoint(worker.joined)
            change.joined += 1
        change.left = change.left or not worker.alive
        before_it = endpoint.standing
        endpoint.status = worker.health.status
        endpoint.corrupt, endpoint.suspect = worker.health.corrupt, self._suspect(worker)
        endpoint.cache_epoch = worker.cache_epoch
        endpoint.expected = worker.expected
        out = (endpoint.corrupt or worker.health.charges.accused) and not endpoint.suspect
        endpoint.weight = 0.0 if out or not endpoint.context_tokens else worker.weight
        if endpoint.adapters != (adapters := frozenset(worker.joined.adapters)):
            endpoint.adapters, change.adapters = adapters, True
        now = worker.drain, worker.health.limits
        same = before is not None and (before.drain, before.health.limits) == now
        change.moved = change.moved or not same or before_it != endpoint.standing
        change.updated.append((endpoint, worker))

    def _suspect(self, worker: Worker) -> str:
        """Return why a worker that serves only as its model's last worker is distrusted; "" for any other worker.

        The reason is that the worker failed its canaries, or that its lineage (reported weights) is new. The controller
        decides some time after the evidence whether the worker serves. Until then, this method predicts the decision, so that
        requests need not move.
        """
        why = worker.health.charges.accused or worker.health.reason
        if worker.serves_suspect:
            return why
        if not (worker.health.corrupt and worker.suspect and self._keeps_last):
            return ""
        model = worker.joined.model
        others = (one for one in self._known.values() if one is not worker and one.joined.model == model)
        serves = (one.serves_suspect or (one.routable and not one.health.corrupt) for one in others)
        return "" if any(serves) else why

    @property
    def _keeps_last(self) -> bool:
        return bool((self._policy or {}).get("budget", {}).get("keep_last", False))

    def stands_in(self, served: str, lineage: Lineage | None = None, without: Collection[Key] = ()) -> bool:
        """Return whether requests can wait for a worker that is out of service only because of failed canaries.

        Such a worker serves as soon as the controller sees that no other worker of the model serves. Workers in `without` are
        ignored.
        """
        model, adapter = self.model_of(served), self.adapter_of(served)
        return self._keeps_last and any(
            worker.joined.model == model
            and (not adapter or adapter in worker.joined.adapters)
            and worker.suspect
            and worker.health.limit > 0.0
            and (worker.joined.worker, worker.joined.instance) not in without
            and lineage in (None, (worker.joined.revision, worker.joined.tokenizer))
            for worker in self._known.values()
        )

    def worker(self, endpoint: Endpoint) -> Worker | None:
        """Return the fleet's state of an endpoint's worker, or None if that worker instance has ended."""
        worker = self._known.get(endpoint.worker)
        same = worker is not None and worker.alive and worker.joined.instance == endpoint.instance
        return worker if same else None

    def drains(self, endpoint: Endpoint) -> bool:
        """Return whether the fleet drains an endpoint's worker instance, even if the instance does not know it yet."""
        worker = self.worker(endpoint)
        return worker is not None and worker.drain.active

    @property
    def workers(self) -> Iterable[Worker]:
        """Every worker in the fleet state, dead and removed ones included."""
        return (*self._known.values(), *self._departed.values())

    def set_thresholds(self, fact: BusyThresholdsSet) -> None:
        """Apply busy thresholds that were set at this frontend, before the fleet state contains them.

        When the thresholds in the fleet state next change, the table takes over all thresholds of the fleet state. The
        fleet state also has the changes that were made at other frontends.
        """
        before = self.thresholds.get(fact.model, NEVER)
        self.thresholds = {**self.thresholds, fact.model: thresholds.evolve(before, fact)}

    # --- models and adapters

    def serving(self, served: str) -> Sequence[Endpoint]:
        """Return the endpoints of a model, or those that have an adapter now."""
        found = self.models.get(served)
        return found if found is not None else self.adapters.get(served, ())

    def model_of(self, served: str) -> str:
        """Return the model of an adapter. Return every other name unchanged."""
        return self.adapters[served][0].model if served in self.adapters else served

    def adapter_of(self, served: str) -> str:
        """Return the name if it is that of an adapter; empty if it is not."""
        return served if served in self.adapters else ""

    def slo(self, served: str) -> Slo:
        """Return a model's latency objectives from the policy."""
        model = self.model_of(served)
        if (found := self._slos.get(model)) is None:
            found = slo_of(self._policy, model)
            if model in self.models:  # clients can name any model; cache only known ones
                self._slos[model] = found
        return found

    def set_static(self, joined: Iterable[WorkerJoined]) -> None:
        """Fill the table with these workers, all HEALTHY, instead of the workers of a fleet state."""
        fresh = []
        for fact in joined:
            endpoint = self.endpoints.get((fact.worker, fact.instance)) or Endpoint(fact)
            endpoint.weight, endpoint.status, endpoint.expected = 1.0, HealthStatus.HEALTHY, True
            self.known.add(fact.model)
            fresh.append(endpoint)
        self._replace(fresh)

    def knobs(self, served: str) -> Knobs:
        """Return the service settings (knobs) of a model's degradation level, or the default ones if no level is set."""
        return self._knobs.get(self.model_of(served), _USUAL)

    def sheds(self, served: str, tier: str) -> bool:
        """Return whether a model's degradation level sheds requests of this tier."""
        return self.tiers.sheds(self.knobs(served), tier)

    def urgency(self, tier: str) -> int:
        """Return the urgency of a tier's requests. 0 is the most urgent."""
        return self.tiers.rank(tier)

    def group(self, served: str, lineage: Lineage) -> EndpointGroup | None:
        """Return the workers of one lineage (revision and tokenizer) of a model or adapter, or None if there are none.

        The group is cached until the workers or their health change, because each request calls this several times.
        """
        name = (served, lineage)
        group = self._group.get(name)
        if group is None and name not in self._group:
            endpoints = [endpoint for endpoint in self.serving(served) if endpoint.lineage == lineage]
            group = self._group[name] = EndpointGroup.of(endpoints) if endpoints else None
        return group

    @property
    def served(self) -> list[str]:
        """The models with a worker in service."""
        return _in_service(self.models)

    @property
    def served_adapters(self) -> list[str]:
        """The adapters with a worker in service."""
        return _in_service(self.adapters)

    def migration_limit(self, model: str) -> int | None:
        """Return the migration limit that most of a model's routable workers have registered; None if none has one.

        If no worker is routable, all workers of the model count.
        """
        if model not in self._limits:
            endpoints = self.models.get(model, ())
            voters = [one for one in endpoints if one.routable] or endpoints
            limits = [one.joined.migration_limit for one in voters if one.joined.migration_limit is not None]
            self._limits[model] = most_common_value(limits) if limits else None
        return self._limits[model]

    def _replace(self, endpoints: Iterable[Endpoint]) -> None:
        self.endpoints = {endpoint.key: endpoint for endpoint in endpoints}
        self.models = {}
        self._group.clear()
        self._limits.clear()
        for endpoint in self.endpoints.values():
            self.models.setdefault(endpoint.joined.model, []).append(endpoint)
        self.adapters = adapters_of(self.endpoints.values(), self.models)


def _in_service(served: Mapping[str, Sequence[Endpoint]]) -> list[str]:
    return sorted(name for name, endpoints in served.items() if any(one.routable for one in endpoints))
