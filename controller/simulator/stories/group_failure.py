"""Simulates the failure of one GPU in a tensor-parallel group, and prints a transcript.

The scenario is from the project's first design document, but all times result from the simulation. Sixteen groups of eight
GPUs serve a 70B model. GPU 47 raises Xid 48, and the group of this GPU, g6, is lost. The group's whole KV cache is lost too,
because each GPU holds one of the eight KV heads. The other fifteen groups re-prefill 23 requests of 2,048 tokens.

The controllers, the computation of the fleet state and the frontend's director (which routes requests) are production code.
The groups, the connections to them and time are simulated.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter

from controller.deciders.fleet import FleetPolicy
from controller.deciders.health_state import HealthPolicy
from controller.frontend.director import Director, World
from controller.frontend.dispatch.live_request import LiveRequest
from controller.frontend.openai.choice import Choice, ResponseWriter
from controller.frontend.request.state import GenerationRequest
from controller.frontend.settings import FrontendSettings
from controller.ports import Sink
from controller.replay.sentences import sentence, span
from controller.router.endpoints import ConnectedWorkers, Lineage
from controller.simulator.simulation import Simulation, quiet
from controller.simulator.world.broker import SimulatedOutbox
from controller.simulator.world.kernel import MINUTE, MS, SECOND, Kernel, KernelClock, since_start
from controller.simulator.world.machines import Machine
from controller.simulator.world.scenario import Scenario, capacity_of, promising
from controller.simulator.world.surroundings import Replica
from controller.simulator.world.world import numbered
from events import observations as seen
from events.blocks import BlockNames
from events.decisions import Absorbed, DegradationChanged, HealthChanged, SpareActivated, WorkerDecision
from events.fact import Fact, Observation, Recorded
from events.wire import Chunk, Generate, Load, Sampling, Why

FIRST, SPAN = 259, 1700  # token ids that are not special tokens of the simulated engine


def crowd(requests: int, tokens: int, model: str, lineage: Lineage) -> list[Choice]:
    """Return `requests` requests with prompts of `tokens` tokens.

    The prompts share no prefix, and the answers do not end early.
    """
    answers = []
    for n in range(requests):
        prompt = [FIRST + (n * 31 + k) % SPAN for k in range(tokens)]
        request = GenerationRequest(
            id=f"r{n + 1}",
            model=model,
            lineage=lineage,
            prompt=prompt,
            names=BlockNames(prompt),
            sampling=Sampling(max_tokens=4000, ignore_eos=True),
            deterministic=True,
        )
        answers.append(Choice(request, ResponseWriter()))
    return answers


def computed_again(requests: Iterable[LiveRequest]) -> Counter[str]:
    """Return, by worker, how many tokens are re-prefilled for the requests that continue at the worker."""
    load: Counter[str] = Counter()
    for live in requests:
        assert live.endpoint is not None
        load[live.endpoint.worker] += live.length
    return load


def most_over_even(load: Counter[str], workers: int) -> float:
    """Return the highest load of one worker, divided by the mean load of `workers` workers."""
    return max(load.values()) * workers / load.total()


SEED = 48
GROUPS, TP, REQUESTS, TOKENS = 16, 8, 23, 2048
CONTEXT = 8192  # fits a request's prompt and an answer of up to 4,000 tokens
FAILED_GPU, XID = 47, "48"
FAILED = f"g{FAILED_GPU // TP + 1}"
FAILS_AT, NEW_GROUP_AFTER, ENDS_AFTER = 5 * MINUTE, 60 * SECOND, 6 * MINUTE
STEP = 20 * MS
ACQUITTED_BY = HealthPolicy().good_to_acquit
SEVENTY_B = seen.Profile(
    kv_blocks=40_000,
    block_tokens=16,
    max_batch=64,
    prefill_tokens_per_s=5000.0,
    tpot_ms=((1, 10.0), (64, 20.0)),
)


class SimulatedRequestPlane(ConnectedWorkers):
    """The simulated connections of one frontend to all workers, with the workers' engines.

    Each worker prefills its prompts one after another.
    """

    def __init__(self, kernel: Kernel, machines: dict[str, Machine]) -> None:
        self._kernel = kernel
        self._machines = machines
        self._streams: dict[int, tuple[str, Sink]] = {}
        self._free_at: dict[str, int] = {}  # when all prompts queued at a worker are computed
        self._last = 0

    def reachable(self, worker: str, instance: str) -> bool:
        return self._machines[worker].runs(instance)

    recently_heard = reachable

    def draining(self, worker: str, instance: str) -> bool:
        return False

    def load(self, worker: str) -> Load | None:
        return Load(kv_total=SEVENTY_B.kv_blocks)

    def open(self, worker: str, instance: str, request: Generate, sink: Sink) -> int:
        self._last += 1
        self._streams[self._last] = (worker, sink)
        duration = int(len(request.tokens) / SEVENTY_B.prefill_tokens_per_s * SECOND)
        done = max(self._kernel.now, self._free_at.get(worker, 0)) + duration
        self._free_at[worker] = done
        self._kernel.after(done - self._kernel.now, self.emit, self._last)
        return self._last

    def cancel(self, worker: str, stream: int, why: Why = "gone") -> None:
        self._streams.pop(stream, None)

    def emit(self, stream: int) -> None:
        """Deliver the next token of a stream, and schedule the delivery of the following token."""
        if stream in self._streams:
            _, sink = self._streams[stream]
            sink.take(Chunk(stream, [300]))
            sink.flush()
            self._kernel.after(STEP, self.emit, stream)

    def broken(self, worker: str) -> None:
        """Report to every stream of a worker that the connection to the worker is lost."""
        gone = [stream for stream, (at, _) in self._streams.items() if at == worker]
        for _, sink in [self._streams.pop(stream) for stream in gone]:
            sink.lost("disconnected", "its group has failed")


class GroupFailure(Simulation):
    """The simulated fleet, one frontend's director (which routes requests), and the failure of one group."""

    def __init__(self, provisioned: float, spares: int = 0) -> None:
        super().__init__(_scenario(provisioned, spares))
        self.provisioned, self.spares = provisioned, spares
        self.requests: list[LiveRequest] = []
        self.load: Counter[str] = Counter()  # tokens to compute again, by group
        self._plane = SimulatedRequestPlane(self.kernel, self.machines)
        outbox, chance = SimulatedOutbox(self.broker, "frontend:f1"), self.kernel.chance("choices").random
        clock = KernelClock(self.kernel)
        world = World("f1", self._plane, outbox.observe, clock, chance)  # type: ignore[arg-type]
        self.director = Director(world, FrontendSettings())
        self.director.go_live()
        Replica("f1", self.broker, self._absorbed)

    def _names(self) -> list[str]:
        return numbered("g", self.scenario.workers)

    def _machine(self, name: str, index: int) -> Machine:
        gpus = tuple(f"GPU {index * TP + rank}" for rank in range(TP))
        model, host = self.scenario.models[0], (self.kernel, self.broker, self._broken)
        spare = index >= GROUPS
        return Machine(name, model, *host, profile=SEVENTY_B, gpus=gpus, spare=spare, context_tokens=CONTEXT)

    def _broken(self, machine: Machine) -> None:
        super()._broken(machine)
        self._plane.broken(machine.name)

    def _absorbed(self, replica: Replica, batch: Sequence[Recorded]) -> None:
        self.director.absorb(replica.fleet, batch)

    @property
    def most_over_even(self) -> float:
        """The highest load of one group, divided by the mean load of the groups in service after the failure."""
        return most_over_even(self.load, GROUPS - 1 + min(self.spares, 1))

    async def play(self) -> str:
        """Run the scenario, and return the transcript."""
        with quiet():
            self.begin()
            await self._until(FAILS_AT - SECOND)
            self._start_requests()
            await self._until(FAILS_AT, MS)
            self._strike()
            await self._until(FAILS_AT + 20 * MS, MS)
            self.load = computed_again(self.requests)
            await self._until(FAILS_AT + 2 * SECOND, MS)
            await self._until(self.scenario.end_at)
        compared = ["", *self._beside_the_seeds()] if self.spares else []
        lines = [*_heading(self.provisioned, self.spares), *self._lines(), "", *self._spread(), *compared]
        return "\n".join(lines) + "\n"

    async def _until(self, until: int, step: int = 100 * MS) -> None:
        """Advance virtual time to `until`, in steps of `step`. Both are in microseconds.

        After each step, the asyncio event loop runs once. In this loop, the frontend's director sends the requests of a failed
        worker to other workers.
        """
        while self.kernel.now < until:
            self.kernel.run(min(until, self.kernel.now + step))
            await asyncio.sleep(0)

    def _start_requests(self) -> None:
        """Start the requests at the group that will fail.

        Each request receives at least one token before the failure.
        """
        endpoints, driver = self.director.table.endpoints, self.director.driver
        endpoint = next(endpoint for endpoint in endpoints.values() if endpoint.worker == FAILED)
        for answer in crowd(REQUESTS, TOKENS, endpoint.joined.model, endpoint.lineage):
            (live,) = driver.launch([answer], planned=endpoint.key)
            self.requests.append(live)
            if live.dispatch is not None:
                self.kernel.after(SECOND - STEP, self._plane.emit, live.dispatch.stream)

    def _strike(self) -> None:
        group = self.machines[FAILED]
        group.retired = True  # until the failed group is replaced
        group.observe(seen.DeviceFaulted, device=f"GPU {FAILED_GPU}", fault_class="xid", code=XID)
        self.kernel.after(MS, group.shut_down)
        self.kernel.after(NEW_GROUP_AFTER, self._replace, group)

    def _replace(self, group: Machine) -> None:
        group.retired = False
        group.start()

    # --- the transcript

    def _since_failure(self) -> list[tuple[int, Fact]]:
        """Return the facts on the journal since the failure, each with its time in microseconds after the failure."""
        facts = ((since_start(event.at) - FAILS_AT, event.fact) for event in self.broker.events)
        return [(at, fact) for at, fact in facts if at >= 0]

    def _moves(self) -> list[seen.RequestMigrated]:
        """Return the moves of all requests to other groups, the shortest interruption first."""
        moves = (fact for _, fact in self._since_failure() if isinstance(fact, seen.RequestMigrated))
        return sorted(moves, key=attrgetter("gap_ms"))

    def _level(self, at: int) -> str:
        """Return the name of the degradation level at time `at`, in microseconds after the failure."""
        level = 0
        for event in self.broker.events:
            if isinstance(event.fact, DegradationChanged) and since_start(event.at) <= FAILS_AT + at:
                level = event.fact.after
        return f"LEVEL_{level}" if level else "NONE"

    def first(self, kind: type[WorkerDecision], about: str) -> int:
        """Return the time of the first decision of this kind about a worker, in microseconds after the failure.

        Raise LookupError if no such decision was made.
        """
        for at, fact in self._since_failure():
            if isinstance(fact, kind) and about in (fact.worker, getattr(fact, "replaces", "")):
                return at
        raise LookupError(f"no {kind.__name__} decision about {about} after the failure")

    def _beside_the_seeds(self) -> list[str]:
        """Return a table with the times of three events, in this run and in the project's first design document."""
        rows = (
            ("its group is out of service", self.first(HealthChanged, FAILED), "t0 + 2 ms"),
            ("its requests go on elsewhere", int(self._moves()[-1].gap_ms * MS), "t0 + 10 ms"),
            (f"{GROUPS} of {GROUPS} groups serve again", self.first(SpareActivated, FAILED), "t0 + 61 s"),
        )
        lines = [f"{what:32}{_moment(at):>12}{theirs:>18}" for what, at, theirs in rows]
        return [f"{'':32}{'here':>12}{'first document':>18}", *lines]

    def _lines(self) -> list[str]:
        lines = [(at, sentence(fact)) for at, fact in self._since_failure() if _matters(fact)]
        moves = self._moves()
        for move, word in ((moves[0], "first"), (moves[-1], "last")):
            text = f"the {word} of {len(moves)} requests goes on, by {move.method}"
            lines.append((int(move.gap_ms * MS), text))
        return [f"{_moment(at):>18}  {text}" for at, text in sorted(lines, key=itemgetter(0))]

    def _spread(self) -> list[str]:
        tokens = self.load.total()
        by_count = Counter(Counter(live.endpoint.worker for live in self.requests if live.endpoint).values())
        takers = ", ".join(f"{many} groups take {each}" for each, many in sorted(by_count.items()))
        alone_s = tokens / SEVENTY_B.prefill_tokens_per_s
        return [
            f"{tokens:,} tokens are computed again: {takers}.",
            f"The most on one group is {self.most_over_even:.2f} times the even spread.",
            f"On one group alone they would take {span(alone_s)}, evenly spread {span(alone_s / (GROUPS - 1))}.",
            f"Level: {self._level(-1)}, after the failure {self._level(2 * SECOND)}, at the end {self._level(ENDS_AFTER)}.",
            "No KV cache was sent: each GPU of the group held one of its eight heads.",
            f"{FAILED} was convicted: it is well again after {ACQUITTED_BY} good canaries in a row, and a spare then."
            if self.spares
            else f"{FAILED} was convicted: it serves again after {ACQUITTED_BY} good canaries in a row, a little at first.",
        ]


def transcript(provisioned: float, spares: int = 0) -> str:
    """Return the transcript of the scenario.

    `provisioned` is the fleet's capacity without spares, divided by the throughput that its SLO requires. `spares` is the
    number of spare groups.
    """
    return asyncio.run(GroupFailure(provisioned, spares).play())


def _matters(fact: Fact) -> bool:
    decided = not isinstance(fact, Observation | Absorbed)
    shown = seen.DeviceFaulted, seen.WorkerLeft, seen.WorkerJoined, seen.CanaryFailed
    return decided or isinstance(fact, shown)


def _moment(at: int) -> str:
    return f"t0 + {at // MS:,} ms" if at < 10 * SECOND else f"t0 + {at / SECOND:.1f} s"


def _heading(provisioned: float, spares: int) -> list[str]:
    kept = [f"{spares} more {'group is a spare' if spares == 1 else 'groups are spares'}."] if spares else []
    return [
        f"{GROUPS} groups of {TP} GPUs serve a 70B model, provisioned at {provisioned:.1%} of its SLO.",
        f"{REQUESTS} requests of {TOKENS:,} tokens run on {FAILED} when GPU {FAILED_GPU} raises Xid {XID}.",
        *kept,
        "",
    ]


def _scenario(provisioned: float, spares: int) -> Scenario:
    models = ("llama-70b",)
    policy = promising(FleetPolicy(), models, capacity_of(GROUPS, SEVENTY_B) / provisioned)
    return Scenario(
        seed=SEED, workers=GROUPS + spares, minutes=(FAILS_AT + ENDS_AFTER) / MINUTE, models=models, controllers=1,
        frontends=1, requests_per_second=1e-9, interval=30 * SECOND, tick=SECOND, skew=0, late=SECOND,
        corrupt_from_start=0, policies=(policy,), change_at=0, faults={}, heal_at=1,
        end_at=FAILS_AT + ENDS_AFTER, settles=False,
    )  # fmt: skip
