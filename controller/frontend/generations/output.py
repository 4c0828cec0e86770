"""What workers say for one answer: the end of the path of a token, before it is written to the client.

Called by the request plane synchronously, chunk by chunk; it never waits. What one would get wrong: the log of accepted
tokens is what is replayed, not what the client has read; and an attempt that has been left is cancelled at the plane, so
that nothing late of it can come in.

What `take` and `flush` look at with each token lies here flat: an object more between them costs as much as the rest.
"""

from typing import Protocol

from controller.frontend.errors import ApiError
from controller.frontend.generations.attempt import Attempt
from controller.frontend.generations.continuation import Continuation
from controller.frontend.generations.output_check import check_logprobs
from controller.frontend.generations.output_stats import OutputStats
from controller.frontend.generations.worker_refusal import as_api_error
from controller.frontend.openai.text.vocabulary import InvalidOutput, check_tokens
from controller.frontend.openai.writers import ResponseWriter
from controller.frontend.request.failures import Failure, classify
from controller.frontend.request.generation_request import GenerationRequest
from controller.ports import LostCause
from events.refusal import REASON, read_refusal
from events.wire import Chunk, finish_reason


class Owner(Protocol):
    """Whose answer it is, and what it is told of it."""

    def first_output(self) -> None:
        """The first of an attempt has come."""
        ...

    def finished(self, reason: str, *, cancel: bool = False) -> None:
        """The answer is complete; `cancel`: its worker does not know it."""
        ...

    def failed(self, failure: Failure, attempt: Attempt | None) -> None:
        """An attempt has failed: the one that is heard now, or one that the answer has left in time."""
        ...

    def refused(self, error: ApiError) -> None:
        """The worker says that no worker could answer this."""
        ...

    def mistaken(self) -> None:
        """A mistake of ours was just caught."""
        ...


class SourceFollower(Protocol):
    """Who follows what the source of a live migration says."""

    def source_said(self) -> None:
        """The source has said more."""
        ...

    def source_lost(self) -> None:
        """The source is out of reach: leave it, if the answer needs it no more."""
        ...

    def left(self, *, failed: bool) -> None:
        """The answer has left the source by another way."""
        ...


class GenerationOutput:
    """All that was accepted of one answer. Implements `controller.ports.Sink`."""

    __slots__ = (
        "_max", "_owner", "_prompt", "_prompt_tokens", "_stop_token_ids", "accepted", "attempt", "continuation", "has_output",
        "live_migration", "stats", "writer",
    )  # fmt: skip

    def __init__(
        self,
        owner: Owner,
        request: GenerationRequest,
        writer: ResponseWriter,
        continuation: Continuation,
        stats: OutputStats,
    ) -> None:
        self._owner: Owner | None = owner  # None once the answer has ended
        self._max = request.sampling.max_tokens
        self._prompt = request.prompt
        self._prompt_tokens = 0  # of this attempt: one that goes on elsewhere reads what was accepted as well
        self._stop_token_ids = request.sampling.stop_token_ids
        self.writer = writer
        self.continuation = continuation
        self.accepted = continuation.accepted  # one list, which grows with every step
        self.stats = stats
        self.attempt: Attempt | None = None  # the one that is heard now
        self.has_output = False  # this attempt's first token has come
        self.live_migration: SourceFollower | None = None  # its KV cache is on its way elsewhere

    # --- what the plane says ------------------------------------------------------------------------------

    def take(self, chunk: Chunk) -> None:
        """Take one step's output for this stream. Whatever goes wrong with it is nobody else's trouble."""
        owner = self._owner
        if owner is None:
            return
        try:
            try:
                if chunk.logprobs:
                    check_logprobs(chunk.logprobs, self.continuation.tokens.size)
                if self.has_output and chunk.tokens and chunk.finish is None and chunk.error is None:
                    self._go_on(chunk)  # nearly always
                    return
                if chunk.tokens:
                    self._accept(owner, chunk)
                elif chunk.text is not None:
                    self._accept_text(owner, chunk.text)
                if self._owner is None:
                    return  # a stop string ended it meanwhile
                if chunk.error is not None:
                    self._fail(owner, chunk.error)
                elif chunk.finish is not None:
                    reason = chunk.finish
                    owner.finished(reason if reason in ("stop", "length") else finish_reason(reason))
            except InvalidOutput as why:
                owner.failed(Failure("invalid_output", str(why)), self.attempt)
        except Exception:
            owner.mistaken()

    def flush(self) -> None:
        """A turn of the loop is over: count and write what it brought."""
        if self._owner is None:
            return  # it was written as the answer ended
        if self.attempt is not None:
            self.stats.count(len(self.accepted), self.attempt)
        self.writer.flush()
        if self.live_migration is not None:
            self.live_migration.source_said()

    def lost(self, cause: LostCause, detail: str) -> None:
        """The connection broke, or the worker hangs. Others are told of it after this stream, whatever goes wrong here."""
        owner, attempt = self._owner, self.attempt
        if owner is None or attempt is None:
            return
        try:
            if self.live_migration is not None:
                self.live_migration.source_lost()
            owner.failed(Failure(cause, detail), attempt)
        except Exception:
            owner.mistaken()

    def _go_on(self, chunk: Chunk) -> None:
        """Take tokens as they are: nearly all of them are from the middle of an answer."""
        tokens, writer = chunk.tokens, self.writer
        if len(self.accepted) + len(tokens) > self._max:
            tokens = tokens[: self._max - len(self.accepted)]
        if chunk.logprobs:
            self.stats.weigh(chunk.logprobs)
        used = writer.write(tokens, chunk.logprobs)
        if writer.stopped:
            self.accepted += tokens[:used]
            self._stop(chunk)
        else:
            self.accepted += tokens

    def _accept(self, owner: Owner, chunk: Chunk) -> None:
        """Take tokens from the beginning or the end of an attempt."""
        if not self.has_output:
            check_tokens(chunk.tokens, self.continuation.tokens.size)
        if chunk.cached_tokens is not None and self.stats.cached_tokens is None:
            if not 0 <= chunk.cached_tokens <= self._prompt_tokens:
                raise InvalidOutput("a count of cached tokens that its prompt does not have")
            self.stats.cached_tokens = chunk.cached_tokens
        if not self.has_output:
            self.has_output = True
            owner.first_output()
        if chunk.finish not in (None, "length"):
            self._accept_last(chunk)
        else:
            self._go_on(chunk)

    def _accept_last(self, chunk: Chunk) -> None:
        """Take tokens of which the last one may be a stop token: it ends the answer and is no part of its text."""
        tokens = chunk.tokens[: self._max - len(self.accepted)]
        hidden = bool(tokens) and tokens[-1] in self._stop_token_ids
        used = self.writer.write(tokens[:-1] if hidden else tokens, chunk.logprobs)
        if self.writer.stopped:
            self.accepted += tokens[:used]
            self._stop(chunk)
        else:
            self.accepted += tokens

    def _accept_text(self, owner: Owner, text: str) -> None:
        if not self.has_output:
            self.has_output = True
            owner.first_output()
        self.writer.write_text(text, self.continuation.take_text(text))
        if self.writer.stopped:
            self._stop(None)

    def _stop(self, chunk: Chunk | None) -> None:
        """A stop string has been reached: the worker need not go on."""
        if self._owner is not None:
            self._owner.finished("stop", cancel=chunk is None or chunk.finish is None)

    def _fail(self, owner: Owner, error: str) -> None:
        """The worker says that it cannot go on."""
        reason, _, detail = error.partition(":")
        if reason == REASON:
            owner.refused(as_api_error(read_refusal(detail)))
        else:
            owner.failed(classify(error), self.attempt)

    # --- attempts -----------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        """Hear this attempt from now on."""
        self.attempt = attempt
        self.has_output = False
        self._prompt_tokens = len(self._prompt) + len(self.accepted)
        if attempt.before is not None:
            self.stats.attempted()
        if len(self.accepted) > self.stats.movable_max:
            self.stats.note_length(len(self.accepted))

    def count(self) -> None:
        """Count what has come in this turn."""
        if self.attempt is not None:
            self.stats.count(len(self.accepted), self.attempt)

    def leave(self, *, failed: bool) -> Attempt | None:
        """Hear nobody: the attempt has ended, or `failed`. Return it; None if there was none."""
        attempt = self.attempt
        if attempt is not None:
            self.stats.count(len(self.accepted), attempt)
        if self.live_migration is not None:
            live_migration, self.live_migration = self.live_migration, None
            live_migration.left(failed=failed)
        self.attempt = None
        self.has_output = False
        return attempt

    def rewind(self, count: int) -> None:
        """Forget what came after the first `count` tokens; nobody has seen it."""
        self.continuation.rewind(count)
        self.stats.rewind(count)
        self.writer.rewind(count)

    def close(self) -> None:
        """The answer is over: hear nothing more. No cycle is left: what is over is freed at once."""
        self._owner = None
