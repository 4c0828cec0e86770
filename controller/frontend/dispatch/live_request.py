"""One live request: one answer that is being made, with all that the frontend holds for it.

A record without policy. Its state is written by the driver alone, through the request state machine; whatever selects requests
(stall watch, preemption, planned moves, placement) reads it.
"""

from abc import ABC, abstractmethod

from controller.frontend.admission.admission import Reservation
from controller.frontend.dispatch.attempt_record import Dispatch
from controller.frontend.dispatch.continuation import Continuation
from controller.frontend.dispatch.kv_move import KvMove
from controller.frontend.dispatch.output_stats import OutputStats
from controller.frontend.openai.completion import Choice, Completion
from controller.frontend.openai.text.detokenizer import InvalidOutput
from controller.frontend.openai.text.tokenizer import load_tokens
from controller.frontend.request.state import AnswerProgress, RequestState, RequestTerms, stays
from controller.frontend.settings import FrontendSettings
from controller.ports import LostCause
from controller.router.endpoints import Endpoint
from events.wire import Chunk


def terms_of(answer: Choice, settings: FrontendSettings) -> RequestTerms:
    """Return the terms of an answer."""
    request, admission, tokens = answer.request, settings.admission, len(answer.request.prompt)
    return RequestTerms(
        tokens,
        request.sampling.max_tokens,
        answer.migration_limit,
        settings.migration_max_seq_len,
        answer.forbidden,
        settings.on_corruption,
        settings.reroute_s,
        admission.first_token_s + admission.first_token_s_per_1k / 1000 * tokens,
    )


class LiveRequest(ABC):
    """One answer that is being made."""

    __slots__ = (
        "_max", "_prompt_tokens", "_stop_token_ids", "accepted", "answer", "completion", "continuation", "dispatch",
        "exposure", "first_dispatch", "keeps_room", "kv_move", "last_dispatch", "over", "request", "room", "state", "stats",
        "writer",
    )  # fmt: skip

    def __init__(
        self, answer: Choice, completion: Completion | None, state: RequestState, stats: OutputStats
    ) -> None:
        """`completion` learns of the end. Raise TokenizerMissing."""
        self.completion = completion  # None once the answer has ended
        self.answer = answer
        self.request = request = answer.request
        self.writer = answer.writer
        self.accepted = answer.accepted
        self.state = state
        self.continuation = Continuation(request, answer.accepted, load_tokens(request.lineage[1]))
        self.stats = stats
        self.dispatch: Dispatch | None = None  # the attempt that is read now
        self.first_dispatch: Dispatch | None = None
        self.last_dispatch: Dispatch | None = None
        self.kv_move: KvMove | None = None  # a KV transfer under way
        self.room: Reservation | None = None  # given back for it, or (`keeps_room`) kept for it
        self.keeps_room = False
        self.over = False
        self.exposure = ""  # what was done when its tokens were last found to be exposed
        self._max = request.sampling.max_tokens
        self._stop_token_ids = request.sampling.stop_token_ids
        self._prompt_tokens = (
            0  # of this attempt: one that continues elsewhere reads what was accepted as well
        )

    @property
    def endpoint(self) -> Endpoint | None:
        """The worker that it is with."""
        return self.dispatch.endpoint if self.dispatch is not None else None

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what was accepted."""
        return len(self.request.prompt) + len(self.accepted)

    @property
    def progress(self) -> AnswerProgress:
        """How far the answer is, for the state machine."""
        return AnswerProgress(len(self.accepted), self.writer.reached, bool(self.continuation.texts))

    @property
    def stays(self) -> bool:
        """Whether it is not to be moved on purpose: where some of it came as text, the next worker would read it anew."""
        return self.over or bool(self.continuation.texts) or stays(self.state.terms, len(self.accepted))

    def begin(self, dispatch: Dispatch) -> None:
        """Read a new attempt from now on."""
        first = self.first_dispatch = self.first_dispatch or dispatch
        self.dispatch = self.last_dispatch = dispatch
        self.room = None
        self.answer.endpoint = dispatch.endpoint
        if dispatch is first:
            self.answer.explained = dispatch.explained
        self._prompt_tokens = self.length
        if len(self.accepted) > self.stats.movable_max:
            self.stats.note_length(len(self.accepted), self.state)

    def keep_room(self) -> None:
        """Keep the room that the request was admitted with, and that was given back for it."""
        if self.room is not None:
            self.room = self.room.again()
            self.keeps_room = True

    def give_back(self) -> None:
        """Give back the room that was kept."""
        if self.keeps_room and self.room is not None:
            self.keeps_room = False
            self.room.free()

    def turned_away(self, dispatch: Dispatch) -> None:
        """Forget an attempt for which its worker had no room."""
        before = self.last_dispatch = dispatch.before
        self.answer.endpoint = None if before is None else before.endpoint
        if before is None:
            self.first_dispatch = None

    # --- what the request plane reads it through: see `RequestSink`

    @abstractmethod
    def take(self, chunk: Chunk) -> None:
        """Accept one step's output for this stream."""

    @abstractmethod
    def flush(self) -> None:
        """Count and write what one turn of the loop has brought."""

    @abstractmethod
    def lost(self, cause: LostCause, detail: str) -> None:
        """The connection broke, or the worker hangs."""

    # --- tokens: the log of accepted tokens is what is replayed, not what the client has read

    def accept(self, chunk: Chunk) -> bool:
        """Accept tokens as they are. Return whether a stop string was reached. Raise InvalidOutput."""
        tokens, writer, accepted = chunk.tokens, self.writer, self.accepted
        if len(accepted) + len(tokens) > self._max:
            tokens = tokens[: self._max - len(accepted)]
        if chunk.logprobs:
            self.stats.weigh(chunk.logprobs)
        used = writer.write(tokens, chunk.logprobs)
        accepted += tokens[:used] if writer.stopped else tokens
        return writer.stopped

    def accept_last(self, chunk: Chunk) -> bool:
        """Accept the last tokens of an answer. One that is a stop token ends it and is no part of its text."""
        tokens = chunk.tokens[: self._max - len(self.accepted)]
        hidden = bool(tokens) and tokens[-1] in self._stop_token_ids
        used = self.writer.write(tokens[:-1] if hidden else tokens, chunk.logprobs)
        self.accepted += tokens[:used] if self.writer.stopped else tokens
        return self.writer.stopped

    def accept_text(self, text: str) -> bool:
        """Accept text that came without tokens."""
        self.writer.write_text(text, self.continuation.take_text(text))
        return self.writer.stopped

    def note_cached(self, chunk: Chunk) -> None:
        """Remember how many tokens of the prompt the first worker had cached. Raise InvalidOutput."""
        stats, cached = self.stats, chunk.cached_tokens
        assert cached is not None
        if not 0 <= cached <= self._prompt_tokens:
            raise InvalidOutput("a count of cached tokens that its prompt does not have")
        stats.cached_tokens = self.answer.cached_tokens = cached

    def count(self, now: float) -> None:
        """Count the tokens that have come since the last count."""
        accepted, stats = len(self.accepted), self.stats
        if self.dispatch is not None:
            stats.count(now, accepted, self.dispatch)
            if accepted > stats.movable_max:
                stats.note_length(accepted, self.state)

    def rewind(self, count: int) -> None:
        """Forget all accepted tokens after the first `count`; the client has seen none of these."""
        self.continuation.rewind(count)
        self.stats.rewind(count)
        self.writer.rewind(count)
