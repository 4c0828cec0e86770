"""One HTTP request and its answers: one flight per prompt and choice, one response made of them all."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from controller.frontend.bodies import Ask
from controller.frontend.desk import Desk
from controller.frontend.errors import ApiError, invalid, too_long, unsupported
from controller.frontend.flight import Flight
from controller.frontend.migration import Allowance
from controller.frontend.names import BlockNames
from controller.frontend.plan import Plan
from controller.frontend.sse import DONE, SseStream
from controller.frontend.voice import FoldVoice, Form, StreamVoice, event
from controller.frontend.wishes import EXPLAIN, NO_WISHES, Wishes
from controller.router.table import Lineage
from events.blocks import seed
from events.wire import Sampling

COMPLETION_TOKENS_DEFAULT = 16  # what OpenAI's completions endpoint does without max_tokens
SEED_BITS = 31
EXPLAINED_MAX = 8  # candidates in a header: clients take 8 KB of them or so


class Admitted(msgspec.Struct, frozen=True):
    """A request that has been let in, tokenised."""

    ask: Ask
    request: str  # its id
    tier: str
    lineage: Lineage
    prompts: Sequence[tuple[list[int], str]]  # tokens, and the text if it was one
    context: int  # tokens that a prompt and its answer may have together
    serial: int  # of this frontend's requests: unseeded sampling is seeded with it
    traceparent: str = ""
    wishes: Wishes = NO_WISHES


class Exchange:
    """The flights of one request, and what becomes of them together."""

    def __init__(self, desk: Desk, admitted: Admitted, form: Form, stream: SseStream | None) -> None:
        self._desk = desk
        self._ask = admitted.ask
        self._form = form
        self._stream = stream
        self.over: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        self.flights: list[Flight] = []
        self._left = len(admitted.prompts) * admitted.ask.n
        salt = seed(namespace=admitted.ask.cache_salt)
        for prompt, text in admitted.prompts:
            names = BlockNames(prompt, salt)
            for choice in range(admitted.ask.n):
                self._add(admitted, prompt, text, names, choice)

    def _add(self, admitted: Admitted, prompt: list[int], text: str, names: BlockNames, choice: int) -> None:
        ask, desk = admitted.ask, self._desk
        index = len(self.flights)
        voice = (
            StreamVoice(self._form, self._stream, index)
            if self._stream is not None
            else FoldVoice(self._form)
        )
        plan = Plan(
            request=admitted.request,
            model=ask.model,
            lineage=admitted.lineage,
            prompt=prompt,
            prompt_text=text,
            sampling=sampling(ask, len(prompt), admitted.context, choice, admitted.serial),
            guided=ask.guided,
            deterministic=desk.routing.engine(ask.model, admitted.lineage) != "openai"
            or _repeats_anywhere(ask),
            names=names,
            tier=admitted.tier,
            cache_salt=ask.cache_salt,
            wishes=admitted.wishes,
            traceparent=admitted.traceparent,
        )
        forbidden = "n_over_1" if ask.n > 1 else "guided_decoding" if ask.guided else ""
        allowance = Allowance(desk.routing.limit(ask.model), desk.settings.migration_max_seq_len, forbidden)
        self.flights.append(Flight(desk, plan, voice, allowance, self._ended))

    def launch(self) -> None:
        """Send every flight off."""
        for flight in self.flights:
            flight.meter.inputs.note(len(flight.plan.prompt))
            flight.launch()

    def cancel(self) -> None:
        """The client has gone."""
        for flight in self.flights:
            flight.cancel()

    def fail(self, error: ApiError) -> None:
        """End everything with an error of the frontend's own."""
        self._finish(error)
        self.cancel()

    # --- the end ------------------------------------------------------------------------------------------

    def _ended(self, flight: Flight) -> None:
        """One flight is over; the last one ends the response, and so does the first that fails."""
        self._left -= 1
        if flight.error is not None:
            self._finish(flight.error)
            for other in self.flights:
                other.cancel()
        elif self._left == 0 and flight.finish != "cancelled":
            self._finish(None)

    def _finish(self, error: ApiError | None) -> None:
        if self.over.done():
            return
        self.over.set_result(error)
        stream = self._stream
        if stream is None or (error is not None and not stream.started):
            if stream is not None:
                stream.parts.clear()
            return
        if error is not None:
            stream.parts.append(event(error.body()))
        else:
            if self._ask.include_usage:
                stream.parts.append(self._form.total(self.usage()))
            stream.parts.append(DONE)
        stream.ended = True
        stream.flush()

    def usage(self) -> dict[str, Any]:
        """Return the usage: the client's own prompt, and every token that was accepted, over all attempts."""
        prompt = made = cached = 0
        for place, flight in enumerate(self.flights):
            made += len(flight.accepted)
            if place % self._ask.n == 0:  # the choices of a prompt share it
                prompt += len(flight.plan.prompt)
                cached += flight.cached_tokens or 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def body(self) -> dict[str, Any]:
        """Return the whole answer of a request that is not streamed."""
        voices = [flight.voice for flight in self.flights]
        choices = [voice.choice(i) for i, voice in enumerate(voices) if isinstance(voice, FoldVoice)]
        form = self._form
        name = "chat.completion" if form.chat else "text_completion"
        head = {"id": form.id, "object": name, "created": form.created, "model": form.model}
        return head | {"choices": choices, "usage": self.usage()}

    @property
    def headers(self) -> dict[str, str]:
        """What the answer's headers say of the choice of its worker."""
        name = self.worker if self.worker.isprintable() else ascii(self.worker)  # it registers as it likes
        headers, why = {"X-Holdfast-Worker": name}, self.flights[0].explained
        if why is not None:
            headers[EXPLAIN] = json.dumps(_shortened(why))
        return headers

    @property
    def worker(self) -> str:
        """Who answers: the worker that the first answer is with, or was with last."""
        seat = self.flights[0].last_seat
        return seat.worker if seat is not None else ""


def _shortened(why: dict[str, Any]) -> dict[str, Any]:
    """Return an explanation with the best candidates and the one that was chosen, and how many there were."""
    every, chosen = why["candidates"], why["chosen"]
    best = every[:EXPLAINED_MAX]
    best += [one for one in every[EXPLAINED_MAX:] if chosen.items() <= one.items()]
    return why | {"of": len(every), "candidates": best}


def sampling(ask: Ask, prompt_tokens: int, context: int, choice: int, serial: int) -> Sampling:
    """Return how the workers should choose tokens. Raise ApiError if the request does not fit into the context."""
    room = context - prompt_tokens
    if room < 1:
        raise too_long(prompt_tokens, context, "messages" if ask.chat else "prompt")
    wanted = ask.max_tokens or (room if ask.chat else min(room, COMPLETION_TOKENS_DEFAULT))
    if wanted > room:
        message = f"{prompt_tokens} prompt tokens and max_tokens {wanted} are more than the model's context {context}"
        raise invalid(message, "max_tokens", "context_length_exceeded")
    if ask.min_tokens > wanted:
        raise invalid(f"min_tokens {ask.min_tokens} is more than max_tokens {wanted}", "min_tokens")
    # An unseeded request gets a seed of ours: after a migration the random numbers go on where they were.
    seed = ask.seed if ask.seed is not None else (serial * 2_654_435_761 & (1 << SEED_BITS) - 1)
    return Sampling(
        max_tokens=wanted,
        min_tokens=ask.min_tokens,
        temperature=ask.temperature,
        top_p=ask.top_p,
        top_k=ask.top_k,
        seed=seed + choice if ask.temperature > 0 else ask.seed,
        ignore_eos=ask.ignore_eos,
        stop_token_ids=list(ask.stop_token_ids),
        presence_penalty=ask.presence_penalty,
        frequency_penalty=ask.frequency_penalty,
        repetition_penalty=ask.repetition_penalty,
        logprobs=0 if ask.logprobs is None else max(1, ask.logprobs),
    )


def _repeats_anywhere(ask: Ask) -> bool:
    """Say whether somebody else's server goes on as the first one would have.

    Its random numbers start anew, and what it is given as a prompt it does not count as said.
    """
    return ask.temperature == 0 and not ask.presence_penalty and not ask.frequency_penalty


def refuse_unobeyed(ask: Ask, engine: str, *, text_only: bool) -> None:
    """Raise ApiError if the answer's form is constrained, or logprobs are asked for, and this engine cannot obey."""
    if ask.guided and engine != "openai":
        raise unsupported(
            next(iter(ask.guided)), f"the {engine} engine cannot constrain the form of its answer"
        )
    if ask.logprobs is not None and text_only:
        raise unsupported("logprobs", "this model's servers give text only")
