"""Defines the broker permissions of each role: the subjects to which it may publish and subscribe.

    worker       publishes its own facts, heartbeats, KV events and replies; subscribes to requests by its name
    frontend     publishes facts about requests, prompts to workers, and stored responses to other frontends; subscribes to both
    controller   publishes decisions, its observations, requests to workers, and replies to operators
    supervisor   publishes which worker has ended and what the broker has refused (`holdfast up`); sets the stream's bounds
    projector    reads only
    planner      publishes the capacity of models and proposed numbers of workers; reads the state store
    notifier     stores undelivered webhook events on a stream beside the journal; the broker stores its read position
    operator     publishes control.*, quarantines and the number of workers; reads, and removes undelivered webhook events
    all          announce the kinds that they know (`live.known`), and receive the kinds in force (`live.kinds`)
    reader       reads only; for your own programs, and the broker stores their read positions

No role can delete or purge the stream, and only `holdfast up` may change its bounds. A reply goes to the requester's own inbox.
A worker's reply goes instead to a subject with the names of the worker and of the requester. Only that worker may publish to it,
and only that requester may subscribe to it. So no process reads another's replies, and no worker replies in another's name.

Note: a role that may read the journal can make JetStream deliver events to a subject to which the role itself may not publish. A
worker that uses a controller's fact intake has no JetStream permission. Such a worker can neither read the journal nor publish to
it, and so cannot direct an acknowledgement to another subject. A controller publishes the worker's facts
(`controller.runtime.intake`). Two kinds of workers publish to the journal themselves: a worker of 0.2.0, which does not know
the intake, and a worker without a seed file.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from events import observations as seen
from events import subjects
from events.broker_users import ROLES, workers_of
from events.fact import Observation
from events.subjects import BUCKET, DEAD, DEAD_STREAM, DECIDED, OBSERVED, STREAM

API = "$JS.API"

PUBLISHES: Mapping[str, tuple[type[Observation], ...]] = {
    "worker": (
        seen.WorkerAwaited,
        seen.WorkerJoined,
        seen.AdaptersChanged,
        seen.WorkerLeft,
        seen.ShutdownBegan,
        seen.DrainFinished,
        seen.DeviceFaulted,
        seen.DeviceRecovered,
        seen.EngineFaulted,
    ),
    "supervisor": (seen.WorkerLeft, seen.IntrusionRefused, seen.ScaleApplied),
    "planner": (seen.CapacityReported, seen.ScaleProposed, seen.ScaleApplied),
    "controller": (
        seen.WorkerSilent,
        seen.WorkerHeard,
        seen.WorkerLingered,
        seen.ObserverBlind,
        seen.DrainRequested,
        seen.ResumeRequested,
        seen.MoveRequested,
        seen.RestartRequested,
        seen.CommandRefused,
        seen.ChaosInjected,
        seen.CanaryPassed,
        seen.CanarySlow,
        seen.CanaryFailed,
        seen.GoldenProposed,
        seen.GoldenDisputed,
        seen.GoldenRequested,
        seen.TokensUnlikely,
        seen.SnapshotKept,
        seen.IntrusionRefused,
    ),
    "frontend": (
        seen.RequestsServed,
        seen.RequestFailed,
        seen.RequestSuspected,
        seen.RequestPoisonous,
        seen.WorkerSlow,
        seen.WorkerSlowCleared,
        seen.RequestMigrated,
        seen.RequestPreempted,
        seen.RequestResumed,
        seen.RequestAbandoned,
        seen.RequestsRejected,
        seen.TrafficReported,
        seen.BusyThresholdsSet,
        seen.RequestExposed,
        seen.ExposureUnknown,
        seen.PanicBegan,
        seen.PanicEnded,
        seen.FrontendBreakersMoved,
        seen.IntrusionRefused,
    ),
    "operator": (seen.EventQuarantined, seen.ScaleSet),
}
"""The kinds of observations that each role may publish."""

_JOURNAL = (f"{API}.STREAM.INFO.{STREAM}", f"{API}.STREAM.MSG.GET.{STREAM}")
_READS = (
    *_JOURNAL,
    f"{API}.CONSUMER.CREATE.{STREAM}.*",
    f"{API}.CONSUMER.MSG.NEXT.{STREAM}.*",
    f"{API}.CONSUMER.DELETE.{STREAM}.*",
)
_REMEMBERED = (  # durable consumers, with or without filters in their names, and their acknowledgements
    f"{API}.CONSUMER.CREATE.{STREAM}.*.>",
    f"{API}.CONSUMER.INFO.{STREAM}.*",
    f"{API}.CONSUMER.DURABLE.CREATE.{STREAM}.*",
    f"$JS.ACK.{STREAM}.>",
)
_MAKES = (f"{API}.STREAM.CREATE.{STREAM}",)
_BOUNDS = (f"{API}.STREAM.UPDATE.{STREAM}",)
_DEAD = f"{API}.STREAM.%s.{DEAD_STREAM}"
_BURIES = (_DEAD % "CREATE", f"{DEAD}.*")
_EXHUMES = (_DEAD % "MSG.GET", _DEAD % "MSG.DELETE")
_LEASE = (f"{API}.STREAM.CREATE.KV_{BUCKET}", f"{API}.STREAM.MSG.GET.KV_{BUCKET}", f"$KV.{BUCKET}.>")
_KNOWN = f"{subjects.KNOWN}.%s.*"  # announcements of the processes of a role
_STORED = f"{subjects.RESPONSES}.*"  # requests among frontends for stored responses
_PLANES = f"{subjects.PLANE}.*.*.*"  # the channels of the request plane
_KINDS = "live.kinds.*"  # the kinds in force, as the leading controller sends them


@dataclass(frozen=True, slots=True)
class BrokerUser:
    """One broker account: the subjects that it may publish to and subscribe to. All other subjects are denied."""

    name: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def users(processes: Iterable[str], by_intake: Container[str] | None = None) -> list[BrokerUser]:
    """Return all accounts of a fleet: one per role, and one per worker process in `processes` (names as `worker_user` returns
    them).

    Worker processes in `by_intake` send their facts to a controller's fact intake. The other worker processes publish to the
    journal themselves. None means that the fleet has no fact intake.
    """
    taken_in = by_intake is not None
    workers = [_worker(user, direct=user not in (by_intake or ())) for user in sorted(set(processes))]
    return [*(_role(name, intake=taken_in) for name in ROLES), *workers]


def _role(name: str, *, intake: bool) -> BrokerUser:
    answers = subjects.answers(f"{name}.*")
    facts = (*_facts(PUBLISHES.get(name, ())), _KNOWN % name)
    hears: tuple[str, ...] = ()
    match name:
        case "controller":
            taken_in = (*_facts(PUBLISHES["worker"]), "_INBOX.*.*.*") if intake else ()
            asks = (f"live.{verb}.*" for verb in subjects.VERBS)
            names = (
                f"{API}.CONSUMER.NAMES.{STREAM}"  # lists all readers of the journal, even unannounced ones
            )
            says = (*_READS, *_MAKES, *_LEASE, *facts, *taken_in, f"{DECIDED}.*", *asks, _PLANES, names)
            says = (*says, "_INBOX.operator.>")
            hears = (answers, subjects.BEATS, subjects.LINKS, subjects.KNOWN_ALL, f"{subjects.CONTROL}.*")
            hears = (*hears, subjects.SAY_ALL) if intake else hears
        case "frontend":
            says = (*_READS, *facts, subjects.LINKS, subjects.KV_SLOTS, "kv.ask.*.*", _PLANES)
            says = (*says, _STORED, f"_INBOX.{name}.>")  # with the replies to other frontends
            hears = (answers, subjects.LINKS, subjects.KV_EVENTS, subjects.KV_SLOTS, _STORED)
        case "supervisor":
            says = (*_READS, *_MAKES, *_BOUNDS, *facts)
        case "operator":
            says = (*_READS, *_EXHUMES, *facts, f"{subjects.CONTROL}.*")
        case "notifier":
            says = (*_READS, *_REMEMBERED, *_BURIES, *facts)
        case "planner":
            says = (*_JOURNAL, *facts)
        case "reader":
            says = (*_READS, *_REMEMBERED)
        case _:
            says = (*_READS, *facts)
    return BrokerUser(name, says, (f"_INBOX.{name}.>", _KINDS, *hears))


def _worker(user: str, *, direct: bool) -> BrokerUser:
    says, hears = [*_JOURNAL] if direct else [subjects.journal_end(user)], [f"_INBOX.{user}.>"]
    for worker in workers_of(user):
        facts = _facts(PUBLISHES["worker"], worker)
        says += facts if direct else (subjects.fact_of_worker(user, subject) for subject in facts)
        says += [subjects.beat(worker), subjects.kv_events(worker), f"{subjects.ANSWER}.{worker}.>"]
        says += [subjects.known("worker", worker), subjects.known("watch", worker)]
        hears += [subjects.live(worker), f"kv.ask.{worker}.*", f"{subjects.PLANE}.{worker}.*.*"]
    return BrokerUser(user, tuple(says), tuple(hears))


def _facts(kinds: Sequence[type[Observation]], about: str = "*") -> Iterable[str]:
    for kind in kinds:
        yield f"{OBSERVED}.{kind.entity}.{'all' if kind.entity == 'fleet' else about}.{kind.kind()}"
