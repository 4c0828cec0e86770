"""The request plane of the transcripts: records frames to workers and delivers scripted replies.

It drops and ignores what the TCP plane drops and ignores, so the record contains exactly the frames that would be sent.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from scripted_worker import next_token

from controller.ports import LostCause, OthersWork, Sink, TransferSink, WorkerUnreachable
from controller.router.trust import TrustedSource
from events.wire import Chunk, Committed, Declined, Generate, Load, Reserved, Why

SEED = 100  # of the first choice of a request with several; the others have the following seeds


class ScriptError(Exception):
    """A command of a transcript cannot be executed."""


def follow(tokens: Sequence[int], seed: int | None) -> int:
    """Return the token that a healthy worker generates after `tokens`. Choices with other seeds get other tokens."""
    return next_token(tokens if seed is None else [*tokens, seed])


def continuation(tokens: Sequence[int], count: int, seed: int | None) -> list[int]:
    """Return the `count` tokens that healthy workers generate after `tokens`."""
    whole = list(tokens)
    for _ in range(count):
        whole.append(follow(whole, seed))
    return whole[len(tokens) :]


@dataclass(eq=False)
class Stream:
    """One stream, or one reservation, at a worker."""

    number: int
    name: str  # of its request, with the index of the choice if there are several
    request: Generate
    sink: Sink
    tokens: list[int]  # the sequence as the worker knows it: received and generated tokens
    carrier: TransferSink | None = None  # of a reservation, or of a transfer from this worker

    def next(self, count: int, *, wrong: bool = False) -> list[int]:
        """Generate tokens. `wrong`: different ones than a healthy worker."""
        new = []
        for _ in range(count):
            token = follow(self.tokens, self.request.sampling.seed)
            new.append(follow([*self.tokens, token], None) if wrong else token)
            self.tokens.append(new[-1])
        return new


@dataclass(eq=False)
class PlaneWorker:
    """The state of one worker in the plane."""

    instance: str
    connected: bool = True
    stuck: bool = False  # its engine hangs while the connection is alive
    refuses: bool = False  # each attempt to send a request fails, which is noticed only then
    draining: bool = False
    others_work: OthersWork = ""
    load: Load = field(default_factory=Load)  # as last reported, without our requests
    open: dict[int, Stream] = field(default_factory=dict)
    reserved: dict[int, Stream] = field(default_factory=dict)


class ScriptedPlane:
    """Implements `controller.ports.RequestPlane` for one frontend."""

    def __init__(self, record: Callable[[str], None]) -> None:
        self._record = record
        self._numbers = itertools.count(1)
        self.workers: dict[str, PlaneWorker] = {}
        self.choices: dict[str, int] = {}  # by request

    # --- queries of the frontend --------------------------------------------------------------------------

    def _connection(self, worker: str, instance: str | None = None) -> PlaneWorker | None:
        found = self.workers.get(worker)
        if found is None or not found.connected or instance not in (None, found.instance):
            return None
        return found

    def reachable(self, worker: str, instance: str) -> bool:
        found = self._connection(worker, instance)
        return found is not None and not found.stuck and not found.draining

    recently_heard = reachable

    def load(self, worker: str) -> Load | None:
        found = self._connection(worker)
        if found is None:
            return None
        return msgspec.structs.replace(found.load, running=found.load.running + len(found.open))

    def load_by_rank(self, worker: str) -> Sequence[Load]:
        load = self.load(worker)
        return () if load is None else (load,)

    def external_load(self, worker: str) -> Load | None:
        found = self._connection(worker)
        return found.load if found is not None else None

    def external_load_by_rank(self, worker: str) -> Sequence[Load]:
        return ()

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> OthersWork:
        return self.workers[worker].others_work

    def draining(self, worker: str, instance: str) -> bool:
        found = self._connection(worker, instance)
        return found is not None and found.draining

    # --- frames of the frontend ---------------------------------------------------------------------------

    def _standing(self, worker: str, instance: str) -> PlaneWorker:
        found = self._connection(worker, instance)
        if found is None or found.refuses:
            raise WorkerUnreachable(f"{worker} is not connected")
        return found

    def _stream(self, request: Generate, sink: Sink, carrier: TransferSink | None = None) -> Stream:
        number = request.stream = next(self._numbers)
        name, seed = request.request, request.sampling.seed
        if self.choices[name] > 1 and seed is not None:
            name += f"[{seed - SEED}]"
        return Stream(number, name, request, sink, list(request.tokens), carrier)

    def open(self, worker: str, instance: str, request: Generate, sink: Sink) -> int:
        try:
            there = self._standing(worker, instance)
        except WorkerUnreachable:
            self._record(f"{worker} cannot be connected to for {request.request}")
            raise
        stream = self._stream(request, sink)
        there.open[stream.number] = stream
        self._record(f"{worker} <- generate {stream.name} {_shown(request)}")
        return stream.number

    def cancel(self, worker: str, stream: int, why: Why = "gone") -> None:
        there = self._connection(worker)
        if there is None:
            return
        if (found := there.open.pop(stream, None)) is not None:
            self._record(f"{worker} <- cancel {found.name} {why}")
        elif (found := there.reserved.pop(stream, None)) is not None:
            self._record(f"{worker} <- cancel reservation {found.name} {why}")

    def reserve(self, worker: str, instance: str, request: Generate, room: int, carrier: TransferSink) -> int:
        there = self._standing(worker, instance)
        stream = self._stream(request, carrier, carrier)
        there.reserved[stream.number] = stream
        self._record(f"{worker} <- reserve {stream.name} {_shown(request)} room={room}")
        return stream.number

    def ship(self, source: TrustedSource, stream: int, offer: Reserved, carrier: TransferSink) -> None:
        there = self._standing(source.worker, source.instance)
        if stream not in there.open:
            raise WorkerUnreachable("the stream is over")
        found = there.open[stream]
        found.carrier = carrier
        target = offer.grants[0].decode()
        self._record(f"{source.worker} <- ship {found.name} to={target}")

    def stay(self, worker: str, stream: int) -> None:
        there = self._connection(worker)
        if there is not None and (found := there.open.get(stream)) is not None:
            found.carrier = None
            self._record(f"{worker} <- stay {found.name}")

    def adopt(self, worker: str, stream: int, sink: Sink) -> None:
        there = self._connection(worker)
        if there is not None and (found := there.open.get(stream)) is not None:
            found.sink = sink

    # --- replies of workers -------------------------------------------------------------------------------

    def opened(self, worker: str, name: str) -> Stream:
        """Return a request's stream at a worker. Raise ScriptError if there is none."""
        return _named(self.workers[worker].open, name, f"{worker} has no open stream of {name}")

    def chunk(self, worker: str, name: str, chunk: Chunk) -> None:
        """Send the output of one engine step for one stream."""
        there, stream = self.workers[worker], self.opened(worker, name)
        chunk.stream = stream.number
        if chunk.finish is not None or chunk.error is not None:
            del there.open[stream.number]
        stream.sink.take(chunk)
        stream.sink.flush()

    def reserves(self, worker: str, name: str, cached: int) -> None:
        """Confirm a reservation at a target."""
        stream = self._reserved(worker, name)
        assert stream.carrier is not None
        stream.carrier.reserved(Reserved(stream.number, [worker.encode()], cached))

    def declines(self, worker: str, name: str, why: str) -> None:
        """Decline a reservation at a target, or a transfer at a source."""
        there = self.workers[worker]
        found = next((one for one in there.reserved.values() if one.name == name), None)
        if found is not None:
            del there.reserved[found.number]
        else:
            found = self.opened(worker, name)
        carrier, found.carrier = found.carrier, None
        if carrier is None:
            raise ScriptError(f"{worker} was not asked to move {name}")
        carrier.declined(*msgspec.structs.astuple(Declined(found.number, why)))

    def commits(self, worker: str, name: str, source: str, unsaid: int, *, differs: bool) -> None:
        """Let a target start to decode.

        The source has generated `unsaid` tokens more than it has sent. `differs`: the target received other tokens.
        """
        there, stream = self.workers[worker], self._reserved(worker, name)
        whole = list(self.opened(source, name).tokens)
        whole += continuation(whole, unsaid, stream.request.sampling.seed)
        if differs:
            whole[-1] = follow([*whole, 1], None)
        more = whole[len(stream.tokens) :]
        stream.tokens = whole
        del there.reserved[stream.number]
        there.open[stream.number] = stream
        carrier, stream.carrier = stream.carrier, None
        assert carrier is not None
        carrier.committed(Committed(stream.number, more, bytes=1000, blocks=2, link="shm", stopped_ms=1.0))

    def lose(self, worker: str, cause: LostCause, detail: str) -> None:
        """Lose all streams of a worker at once."""
        there = self.workers[worker]
        lost = [*there.open.values(), *there.reserved.values()]
        there.open, there.reserved = {}, {}
        if there.connected:
            for stream in lost:
                self._record(f"{worker} <- cancel {stream.name} elsewhere")
        for stream in lost:
            stream.sink.lost(cause, detail)

    def _reserved(self, worker: str, name: str) -> Stream:
        return _named(self.workers[worker].reserved, name, f"{worker} has no reservation of {name}")


def _named(streams: dict[int, Stream], name: str, otherwise: str) -> Stream:
    found = [stream for stream in streams.values() if stream.name == name]
    if not found:
        raise ScriptError(otherwise)
    return found[-1]


def _shown(request: Generate) -> str:
    """Return the transcript's form of a request to a worker: prompt and replayed tokens, and the rest to generate."""
    prompt, sampling = request.tokens[: request.prompt_tokens], request.sampling
    replayed = request.tokens[request.prompt_tokens :]
    shown = [f"tokens={len(prompt)}+{len(replayed)}", f"max_tokens={sampling.max_tokens}"]
    if replayed != continuation(prompt, len(replayed), sampling.seed) and not request.prompt_text:
        shown[0] += " (not those of an undisturbed answer)"
    if sampling.min_tokens:
        shown.append(f"min_tokens={sampling.min_tokens}")
    if sampling.seed is not None:
        shown.append(f"seed={sampling.seed}")
    if request.priority:
        shown.append(f"priority={request.priority}")
    if request.guided is not None:
        shown.append(f"guided={next(iter(request.guided))}")
    if request.guided_fallback is not None:
        shown.append(f"guided_fallback={next(iter(request.guided_fallback))}")
    if request.prompt_text:
        shown.append(f'text="{request.prompt_text}"')
    if request.cache_epoch:
        shown.append(f"cache_epoch={request.cache_epoch}")
    return " ".join(shown)
