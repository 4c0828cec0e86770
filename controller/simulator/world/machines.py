"""The machines on which simulated workers run, with the true state of each worker.

A machine runs one worker process after another, and each process is an instance of the worker. All that other processes can
observe (the answer to a canary, a broken connection, a heartbeat) follows from the machine's true state. The invariant
watch compares this state with the state that the fleet has derived.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from controller.simulator.world.broker import Broker, BrokerMessage, SimulatedOutbox
from controller.simulator.world.kernel import SECOND, Kernel
from events import observations as seen

PROFILE = seen.Profile(
    kv_blocks=2048,
    block_tokens=16,
    max_batch=16,
    prefill_tokens_per_s=8000.0,
    tpot_ms=((1, 10.0), (16, 20.0)),
)
# Fields common to all workers, which differ only in model, engine version and lineage.
ENGINE = {
    "revision": "r1", "tokenizer": "builtin:sim", "engine": "simulated", "dtype": "float32", "device": "sim",
}  # fmt: skip
CANARIES = 4
ANSWER_TOKENS = 4


@dataclass(slots=True)
class Condition:
    """The present faults of a machine. With the default values, there are none."""

    hung: bool = False
    erring: bool = False  # the engine raises
    corrupt: frozenset[int] = frozenset()  # canaries that it answers incorrectly
    corrupt_since: int = -1
    in_hardware: bool = False  # the corruption remains after a restart of the process
    slow: float = 1.0  # latency factor
    flaky: float = 0.0  # probability that a request or canary fails
    cut: bool = False  # disconnected from the broker
    dark: frozenset[str] = frozenset()  # request-plane peers with which all packets are lost
    device: str = ""  # class of a fatal device fault
    limits: dict[str, float] = field(default_factory=dict)  # by device fault class: the weight that it allows


@dataclass(slots=True)
class SimulatedWeights:
    """The weights of a worker, identified by a number. Workers with equal numbers give equal answers."""

    loaded: int = 0
    after_start: int = 0  # the weights that the next process loads
    reported: bool = False  # the engine reports them as its lineage
    ever: set[int] = field(default_factory=lambda: {0})

    def load(self) -> None:
        """Load the weights that were installed last (`after_start`)."""
        self.loaded = self.after_start
        self.ever.add(self.loaded)


@dataclass(slots=True)
class Machine:
    """One worker with its current process and its faults. Times are in microseconds of virtual time."""

    name: str
    model: str
    kernel: Kernel
    broker: Broker
    broken: Callable[["Machine"], None]  # called when every connection to the worker breaks
    life: int = 0
    up: bool = False
    draining: bool = False
    condition: Condition = field(default_factory=Condition)
    corrupt_lives: set[str] = field(default_factory=set)  # instances that ever were corrupt
    outbox: SimulatedOutbox = field(init=False)
    version: int = 1  # engine version: each gives its own answers and has its own canary key
    next_version: int = 1  # engine version of the next process
    spool: list[BrokerMessage] = field(default_factory=list)
    joined: seen.WorkerJoined = field(init=False)
    profile: seen.Profile = PROFILE
    gpus: tuple[str, ...] = ()  # ranks, if the worker is a tensor-parallel group
    spare: bool = False  # starts as a spare
    waiting: int | None = None  # requests that it queues beyond its batch; None: no limit
    context_tokens: int = 4096  # maximum tokens of prompt and answer together
    chance: Random = field(init=False)
    created: int = field(init=False)  # when the slot was added
    retired: bool = False  # no process is started in this slot any more
    drained: bool = False
    held: set[object] = field(default_factory=set)  # requests at the worker, if their number is limited
    weights: SimulatedWeights = field(default_factory=SimulatedWeights)

    def __post_init__(self) -> None:
        self.chance, self.created = self.kernel.chance(self.name), self.kernel.now

    @property
    def instance(self) -> str:
        """The instance id of the current or last process."""
        return f"{self.name}.{self.life}"

    @property
    def beating(self) -> bool:
        """Whether the worker's heartbeats reach the broker."""
        condition = self.condition
        return self.up and self.broker.up and not condition.hung and not condition.cut

    def later(self, delay: int, act: Callable[..., None], *args: object) -> None:
        """Schedule `act(*args)` for `delay` microseconds from now.

        The call is dropped if the machine has started another process by then.
        """
        self.kernel.after(delay, self._if_same, self.life, act, *args)

    def _if_same(self, life: int, act: Callable[..., None], *args: object) -> None:
        if self.life == life:
            act(*args)

    def runs(self, instance: str) -> bool:
        """Return whether `instance` is the current process and is up."""
        return self.up and self.instance == instance

    def reachable(self, peer: str) -> bool:
        """Return whether `peer`, a frontend or the prober, can reach this worker over the request plane."""
        return self.up and not self.condition.hung and peer not in self.condition.dark

    def start(self) -> None:
        """Start a new process, unless one is up or the machine is retired."""
        if self.up or self.retired:
            return
        self.held.clear()
        self.life += 1
        self.version = self.next_version
        self.weights.load()
        self.up, self.draining, self.drained = True, False, False
        self.condition.hung = False
        self.condition.erring = False
        if not self.condition.in_hardware:
            self.heal_corruption()
        if self.condition.corrupt:
            self.corrupt_lives.add(self.instance)
        self.outbox = SimulatedOutbox(self.broker, f"worker:{self.instance}")
        self.outbox.reachable = not self.condition.cut
        self.outbox.inherit(self.spool)
        self.spool = []
        self.joined = _joined(self)
        self.outbox.observe(self.joined)
        for fault_class, weight in self.condition.limits.items():
            self.limit(fault_class, weight)

    def observe(self, kind: type[seen.WorkerObservation], **fields: object) -> None:
        """Publish an observation of this kind about the current process."""
        self.outbox.observe(kind(worker=self.name, instance=self.instance, **fields))

    def announce_again(self) -> None:
        """Register once more, as a worker does after it has reconnected to the broker."""
        if self.up and not self.condition.hung:
            self.outbox.observe(self.joined)

    def crash(self) -> None:
        """End the current process without notice, and break all connections to the process."""
        if self.up:
            self.spool = self.outbox.crash()
            self._down()

    def _down(self) -> None:
        self.up = False
        self.held.clear()
        self.broken(self)

    def accept(self, request: object) -> bool:
        """Add a request to the worker, and return True. If the worker is full, return False."""
        if self.waiting is None:
            return True
        if len(self.held) >= self.profile.max_batch + self.waiting:
            return False
        self.held.add(request)
        return True

    def stop(self) -> None:
        """Stop gracefully, as on SIGTERM: announce the shutdown, drain, and leave."""
        if not self.up or self.condition.hung:
            return
        self.observe(seen.ShutdownBegan, mode="graceful", grace_s=20.0)
        self.draining = True
        self.later(self.chance.randrange(1, 15) * SECOND, self._leave)

    def shut_down(self) -> None:
        """Make the process end itself at once. The process publishes the reason before it ends."""
        if self.up and not self.condition.hung:
            self.observe(seen.ShutdownBegan, mode="self_initiated", grace_s=0.0)
            self._left("self_initiated", 1)

    def limit(self, fault_class: str, weight: float | None) -> None:
        """Limit the worker's weight (0 to 1) because of a device fault. `weight` None ends the limit."""
        about: dict[str, object] = {"device": "gpu0", "fault_class": fault_class}
        if weight is None:
            self.condition.limits.pop(fault_class, None)
            kind: type[seen.WorkerObservation] = seen.DeviceRecovered
        else:
            self.condition.limits[fault_class] = weight
            kind, about = seen.DeviceFaulted, about | {"fatal": False, "weight": weight}
        if self.up:
            self.observe(kind, **about)

    def drain(self) -> None:
        """Begin a drain that the controller has commanded. A draining worker accepts no new requests."""
        if self.up and not self.condition.hung and not self.draining:
            self.draining, self.drained = True, False
            self.later(self.chance.randrange(1, 20) * SECOND, self._empty)

    def resume(self) -> None:
        """Accept requests again, as the controller has commanded."""
        if self.up and not self.condition.hung:
            self.draining = False

    def corrupt(self, canaries: frozenset[int], in_hardware: bool) -> None:
        """Give wrong answers to these canaries from now on.

        With `in_hardware`, the worker gives wrong answers even after a restart of its process.
        """
        self.condition.corrupt = canaries
        self.condition.in_hardware = in_hardware
        self.condition.corrupt_since = self.kernel.now
        self.corrupt_lives.add(self.instance)

    def heal_corruption(self) -> None:
        """Give right answers again."""
        self.condition.corrupt = frozenset()
        self.condition.in_hardware = False
        self.condition.corrupt_since = -1

    def answer(self, canary: int) -> tuple[int, ...]:
        """Return the tokens with which this worker answers a canary.

        The last token is wrong if the worker is corrupt for this canary.
        """
        right = self.right_answer(canary, self.weights.loaded)
        if canary in self.condition.corrupt:
            wrong = 50_000_000 + 100 * int(self.name[1:]) + self.life % 100
            return (*right[:-1], wrong)
        return right

    def right_answer(self, canary: int, weights: int) -> tuple[int, ...]:
        """Return the right answer to a canary for the given weights and this machine's engine version."""
        first = 100_000_000 * weights + 100_000 * self.version + 1000 * (canary + 1)
        return tuple(first + i for i in range(ANSWER_TOKENS))

    def _empty(self) -> None:
        if self.up and self.draining and not (self.drained or self.condition.hung):
            self.drained = True
            self.observe(seen.DrainFinished, completed=0, migrated=0)

    def _leave(self) -> None:
        if self.up and self.condition.hung:  # the shutdown continues once the process responds
            self.later(5 * SECOND, self._leave)
        elif self.up:
            self._empty()
            self._left("graceful", 0)

    def _left(self, mode: str, exit: int) -> None:
        self.observe(seen.WorkerLeft, mode=mode, exit=exit)
        self._down()
        self.kernel.after(2 * SECOND, self._gone, self.outbox)

    def _gone(self, outbox: SimulatedOutbox) -> None:
        """Close the outbox of a process that has left, and keep its unsent facts for the next process."""
        self.spool += outbox.crash()


def _joined(machine: Machine) -> seen.WorkerJoined:
    weights, engine = machine.weights, dict[str, Any](ENGINE)
    engine |= {"model": machine.model, "engine_version": str(machine.version)}
    engine["lineage"] = f"weights={weights.loaded}" if weights.reported else ""
    return seen.WorkerJoined(
        **engine,
        worker=machine.name,
        instance=machine.instance,
        url=f"tcp://{machine.name}:1",
        tp=len(machine.gpus) or 1,
        profile=machine.profile,
        canary_key=seen.canary_key(**engine, tp=1),
        pid=machine.life,
        topology=seen.Topology(host=machine.name, gpus=machine.gpus),
        spare=machine.spare,
        waiting_max=machine.waiting,
        context_tokens=machine.context_tokens,
    )
