"""Who may say and hear what at the broker? One table, by role; the broker holds everybody to it.

    worker       its own facts, beats, KV events and answers; what is asked of it by name
    frontend     facts about requests; prompts to workers; what workers and other frontends tell
    controller   decisions, and what it observes; requests to workers; answers to operators
    supervisor   which worker has ended, and what the broker has refused (`holdfast up`); the stream's bounds
    projector    nothing; it reads
    planner      what models can carry, and how many workers they should have; it reads the state store alone
    notifier     what webhooks have not taken, into a stream beside the journal; the broker remembers how far each has come
    operator     control.*, which place of the journal does not count, and how many workers he wants; it reads, and takes back
                 what webhooks have not taken
    all          which kinds they know (`live.known`), and which are in force (`live.kinds`)
    reader       nothing; programs of yours read with it, and the broker remembers how far they have come

Nobody deletes or purges the stream: no role has a word for it; only `holdfast up` may change its bounds. What is asked is
answered below the asker's own inbox, or, by a worker, below its own name: nobody can read or give another's answers.

What a reader would get wrong: who may read the journal can have JetStream deliver it to a subject that he may not speak on
himself. A worker that uses the intake has no right at JetStream: it can neither read the journal nor publish to it, so no
acknowledgement of its facts reaches another subject. A controller publishes them (`controller.runtime.intrusion.intake`). A
worker of 0.2.0, which does not know that way, and one without a seed file publish to the journal themselves.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from events import observations as seen
from events import subjects
from events.broker_users import ROLES, workers_of
from events.fact import Observation
from events.subjects import BUCKET, DEAD, DEAD_STREAM, DECIDED, OBSERVED, STREAM

API = "$JS.API"

SAYS: Mapping[str, tuple[type[Observation], ...]] = {
    "worker": (
        seen.WorkerAwaited,
        seen.WorkerJoined,
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
"""Which observations each role says."""

_JOURNAL = (f"{API}.STREAM.INFO.{STREAM}", f"{API}.STREAM.MSG.GET.{STREAM}")
_READS = (
    *_JOURNAL,
    f"{API}.CONSUMER.CREATE.{STREAM}.*",
    f"{API}.CONSUMER.MSG.NEXT.{STREAM}.*",
    f"{API}.CONSUMER.DELETE.{STREAM}.*",
)
_REMEMBERED = (  # durable consumers, with filters in their names or not, and their acknowledgements
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
_ASKED = (
    "drain",
    "resume",
    "retire",
    "distrust",
    "batch",
    "stop",
    "chaos",
    "kinds",
)  # of a worker, by controllers
_KNOWN = f"{subjects.KNOWN}.%s.*"  # what processes of a role announce
_KINDS = "live.kinds.*"  # what is in force, as the leading controller answers them


@dataclass(frozen=True, slots=True)
class BrokerUser:
    """One user of the broker: subjects that he may publish to, and subscribe to. All others he may not."""

    name: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def users(processes: Iterable[str], by_intake: Container[str] | None = None) -> list[BrokerUser]:
    """Return all users of a fleet: one for each role, and these of its workers' processes (`worker_user`). Those in `by_intake`
    hand their facts to a controller, the others publish to the journal themselves; None: there is no intake."""
    taken_in = by_intake is not None
    workers = [_worker(user, direct=user not in (by_intake or ())) for user in sorted(set(processes))]
    return [*(_role(name, intake=taken_in) for name in ROLES), *workers]


def _role(name: str, *, intake: bool) -> BrokerUser:
    inbox: tuple[str, ...] = (f"_INBOX.{name}.>",)
    answers = (subjects.answers(f"{name}.*"),)
    facts = (*_facts(SAYS.get(name, ())), _KNOWN % name)
    inbox = (*inbox, _KINDS)
    match name:
        case "controller":
            asks = [f"live.{verb}.*" for verb in _ASKED]
            taken_in = (*_facts(SAYS["worker"]), "_INBOX.*.*.*") if intake else ()
            says = (
                *_READS,
                *_MAKES,
                *_LEASE,
                *facts,
                *taken_in,
                f"{DECIDED}.*",
                *asks,
                f"{subjects.PLANE}.*.*.*",
                f"{API}.CONSUMER.NAMES.{STREAM}",  # readers of the journal, also those that announce nothing
            )
            asked = (subjects.SAY_ALL,) if intake else ()
            hears: tuple[str, ...] = (
                *answers,
                subjects.BEATS,
                subjects.LINKS,
                subjects.KNOWN_ALL,
                f"{subjects.CONTROL}.*",
                *asked,
            )
            return BrokerUser(name, (*says, "_INBOX.operator.>"), (*inbox, *hears))
        case "frontend":
            says = (
                *_READS,
                *facts,
                subjects.LINKS,
                subjects.KV_SLOTS,
                "kv.ask.*.*",
                f"{subjects.PLANE}.*.*.*",
            )
            hears = (*answers, subjects.LINKS, subjects.KV_EVENTS, subjects.KV_SLOTS)
            return BrokerUser(name, says, (*inbox, *hears))
        case "supervisor":
            return BrokerUser(name, (*_READS, *_MAKES, *_BOUNDS, *facts), inbox)
        case "operator":
            return BrokerUser(name, (*_READS, *_EXHUMES, *facts, f"{subjects.CONTROL}.*"), inbox)
        case "notifier":
            return BrokerUser(name, (*_READS, *_REMEMBERED, *_BURIES, *facts), inbox)
        case "planner":
            return BrokerUser(name, (*_JOURNAL, *facts), inbox)
        case "reader":
            return BrokerUser(name, (*_READS, *_REMEMBERED), inbox)
        case _:
            return BrokerUser(name, (*_READS, *facts), inbox)


def _worker(user: str, *, direct: bool) -> BrokerUser:
    says, hears = [*_JOURNAL] if direct else [subjects.journal_end(user)], [f"_INBOX.{user}.>"]
    for worker in workers_of(user):
        facts = _facts(SAYS["worker"], worker)
        says += facts if direct else (subjects.said(user, subject) for subject in facts)
        says += [subjects.beat(worker), subjects.kv_events(worker), f"{subjects.ANSWER}.{worker}.>"]
        says += [subjects.known("worker", worker), subjects.known("watch", worker)]
        hears += [subjects.live(worker), f"kv.ask.{worker}.*", f"{subjects.PLANE}.{worker}.*.*"]
    return BrokerUser(user, tuple(says), tuple(hears))


def _facts(kinds: Sequence[type[Observation]], about: str = "*") -> Iterable[str]:
    for kind in kinds:
        yield f"{OBSERVED}.{kind.entity}.{'all' if kind.entity == 'fleet' else about}.{kind.kind()}"
