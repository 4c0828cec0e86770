"""A frontend's router in virtual time: its index, slot tracker and selector, and the request machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from benchmarks.registration import played_worker
from benchmarks.router.virtual.trace import Request
from controller.frontend.errors import ApiError
from controller.frontend.request import effects as do
from controller.frontend.request import events as on
from controller.frontend.request.state import RequestState, RequestTerms
from controller.frontend.request.step import step
from controller.router.endpoints import Endpoint, Server
from controller.router.index.index import KvIndex, Matches
from controller.router.index.view import apply
from controller.router.load.active_sequences import ActiveSequences
from controller.router.selection.score import USUAL, Pricing, ScoredPrompt
from controller.router.selection.selector import Chooser, Mode
from events.decisions import HealthStatus
from events.kv import KvEvent
from events.observations import Profile, WorkerJoined

NOTHING = Matches()
TERMS = RequestTerms()
LAUNCHED, FIRST_TOKEN, FINISHED = on.Launched(), on.FirstToken(), on.Finished("length")
REFUSED = on.RequestRejected(
    ApiError(400, "longer than the worker's context", code="context_length_exceeded")
)


@dataclass(slots=True)
class SentRequest:
    """A request and its destination. Its state belongs to the frontend's request machine."""

    request: Request
    state: RequestState
    endpoint: Endpoint = field(init=False)

    @property
    def tokens(self) -> int:
        """The tokens of the prompt and of the answer."""
        return self.request.prompt + self.request.answer


class Router:
    """One frontend's view of a fleet of healthy workers."""

    def __init__(
        self,
        workers: Sequence[WorkerJoined],
        mode: Mode = Mode.KV,
        pricing: Pricing = USUAL,
        seed: int = 1,
        *,
        paced: bool = False,
    ) -> None:
        """`paced`: a prompt is expected to be read at the speed that its worker has registered (a frontend's
        `--router-prefill-load-model profile`)."""
        self.endpoints = [Endpoint(worker, 1.0, HealthStatus.HEALTHY, expected=True) for worker in workers]
        self.index = KvIndex()
        self.slots = ActiveSequences()
        self._numbers = {endpoint.key: number for number, endpoint in enumerate(self.endpoints)}
        self._chooser = Chooser(self.slots)
        self._mode, self._pricing, self._paced = mode, pricing, paced
        self._dice = Random(seed)
        self._sent: dict[int, SentRequest] = {}

    def route(self, request: Request, now: float) -> int:
        """Return the number of the worker that gets a request."""
        sent = self._sent[request.key] = SentRequest(request, RequestState(TERMS, now))
        self._feed(sent, LAUNCHED, now)
        return self._numbers[sent.endpoint.key]

    def first(self, key: int, now: float) -> None:
        """Record that a request has its first token."""
        self._feed(self._sent[key], FIRST_TOKEN, now)

    def done(self, key: int, now: float, *, refused: bool = False) -> None:
        """Record that a request is complete, or that its worker cannot serve it."""
        self._feed(self._sent.pop(key), REFUSED if refused else FINISHED, now)

    def _feed(self, sent: SentRequest, event: on.Event, now: float) -> None:
        """Advance a request by an event, and apply the consequences."""
        following: on.Event | None = event
        while following is not None:
            sent.state, effects = step(sent.state, following, now)
            following = None
            for effect in effects:
                match effect:
                    case do.SelectWorker():
                        following = self._choose(sent, now)
                    case do.Started():
                        self.slots.prefill_done(sent.request.key, now=now)
                    case do.Complete() | do.LeaveWorker():
                        self.slots.free(sent.request.key, now=now)
                        sent.endpoint.end(sent.tokens)

    def _choose(self, sent: SentRequest, now: float) -> on.Sent:
        request, size = sent.request, self.endpoints[0].joined.profile.block_tokens
        found = self.index.find(request.names) if self._mode is Mode.KV else NOTHING
        choice = self._chooser.choose(
            self.endpoints,
            ScoredPrompt(request.prompt, size, request.names, found),
            now=now,
            draw=self._dice.random(),
            mode=self._mode,
            pricing=self._pricing,
        )
        sent.endpoint = choice.endpoint
        per_s = sent.endpoint.joined.profile.prefill_tokens_per_s
        self.slots.add(
            request.key,
            choice.holder,
            request.names,
            now=now,
            prefill_tokens=choice.prefill_tokens,
            block_tokens=size,
            expected_s=choice.prefill_tokens / per_s if self._paced else None,
        )
        sent.endpoint.begin(sent.tokens)
        return on.Sent(Server(sent.endpoint.key))

    def heard(self, worker: int, events: Sequence[KvEvent]) -> None:
        """Record what a worker's cache has stored and removed."""
        for event in events if self._mode is Mode.KV else ():
            apply(self.index, self.endpoints[worker].holders[0], event)


def workers(count: int, profile: Profile) -> list[WorkerJoined]:
    """Return the registrations of equal workers."""
    return [played_worker(f"worker-{number}", profile, kv_events=True) for number in range(count)]
