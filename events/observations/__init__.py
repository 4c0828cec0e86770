"""Defines the kinds of observations: one frozen dataclass per kind.

The fields of the dataclass are the body of the event. A kind may get a new optional field. A new meaning needs a new kind, and
no kind or field is ever renamed. The last part of a field's name is its unit. No prompt or text of a user ever enters an event.
The only tokens in events are those of canaries, and the prompts of canaries belong to Holdfast.

`worker` is a worker's stable name ("w3"). `instance` identifies one run of the worker, from its start to its end. State belongs
to a worker and an instance together, so a fact about another instance does not change it.
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
    AdaptersChanged,
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
