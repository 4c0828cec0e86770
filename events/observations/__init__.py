"""The kinds of observations: one frozen dataclass per kind. Its fields are the body of the event.

An optional field may be added to a kind. A new meaning is a new kind, and nothing is ever renamed. A field's unit is the last
part of its name. No prompt or text of a user ever enters an event: the only tokens in here are those of canaries, and their
prompts are ours.

`worker` is a worker's stable name ("w3"); `instance` identifies one run of it, from start to end. State belongs to the pair: a
fact about another instance does not change it.
"""

from events.observations.canaries import (
    UNMARKED,
    CanaryFailed,
    CanaryPassed,
    CanaryReason,
    CanaryResult,
    CanarySlow,
    CheckType,
    GoldenAnswer,
    GoldenDisputed,
    GoldenProposed,
    GoldenRequested,
    TokensUnlikely,
    TopK,
    canary_key,
    is_new_lineage,
)
from events.observations.journal import EventQuarantined, SnapshotKept
from events.observations.planning import (
    CapacityReported,
    ModelObservation,
    ScaleApplied,
    ScaleProposed,
    ScaleSet,
    TrafficReported,
)
from events.observations.requests import (
    BreakerMove,
    BusyThresholdsSet,
    ExposureUnknown,
    FrontendBreakersMoved,
    FrontendObservation,
    MigrationCause,
    PanicBegan,
    PanicEnded,
    RequestAbandoned,
    RequestExposed,
    RequestFailed,
    RequestMigrated,
    RequestPoisonous,
    RequestPreempted,
    RequestResumed,
    RequestsRejected,
    RequestsServed,
    RequestSuspected,
    WorkerSlow,
    WorkerSlowCleared,
)
from events.observations.workers import (
    ChaosInjected,
    Commanded,
    CommandRefused,
    DeviceFaulted,
    DeviceRecovered,
    DrainFinished,
    DrainRequested,
    EngineFaulted,
    IntrusionRefused,
    KvLayout,
    MoveRequested,
    ObserverBlind,
    Profile,
    RestartRequested,
    ResumeRequested,
    ShutdownBegan,
    Topology,
    WorkerAwaited,
    WorkerHeard,
    WorkerJoined,
    WorkerLeft,
    WorkerLingered,
    WorkerObservation,
    WorkerSilent,
)
