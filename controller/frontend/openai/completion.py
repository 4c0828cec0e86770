"""A client's request with its prompts as tokens, its answers, and the response built from them."""

import asyncio
import hashlib
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from controller.frontend.errors import ApiError, invalid, too_long, unsupported
from controller.frontend.openai.choice import Choice
from controller.frontend.openai.formats import AnswerFormat, ChatFormat, OutputModel, WholeResponse
from controller.frontend.openai.intake import Intake
from controller.frontend.openai.messages.events import MessagesFormat
from controller.frontend.openai.output_formats import OutputFormats
from controller.frontend.openai.proxied import ProxiedFormat
from controller.frontend.openai.request_head import Call
from controller.frontend.openai.request_models import TEXT_CHARS_MAX
from controller.frontend.openai.request_parser import ParsedRequest
from controller.frontend.openai.responses.events import ResponsesFormat
from controller.frontend.openai.sse import INEXACT, SseStream
from controller.frontend.openai.text.chat_templates import ChatTemplate
from controller.frontend.openai.text.tokenizer import Tokens
from controller.frontend.request.answer_grammar import AnswerGrammar
from controller.frontend.request.state import GenerationRequest
from controller.router.endpoints import EndpointGroup, Lineage
from events.blocks import BlockNames
from events.grammar.constraint import Constraint
from events.wire import Sampling

COMPLETION_TOKENS_DEFAULT = 16  # default of OpenAI's completions endpoint
SEED_BITS = 31
TRUNCATED_CHARS_PER_TOKEN = 8  # of the context, in a text of which only the last tokens are used
FINGERPRINT_CHARS = 10
FINGERPRINTS_KEPT = 1024
# maximum prompt tokens times logprobs per token: 5 MB of response, and a tenth of a second of the event loop
ECHOED_LOGPROBS_MAX = 100_000

FORMATS: dict[str, type[AnswerFormat]] = {
    "chat": ChatFormat,
    "completions": ChatFormat,
    "messages": MessagesFormat,
    "proxied": ProxiedFormat,
    "responses": ResponsesFormat,
}
"""By API: the format of its responses."""


class AdmittedRequest(msgspec.Struct, frozen=True):
    """A request that was admitted, with its tokenized prompts."""

    call: Call
    lineage: Lineage
    # for each prompt its tokens, its text (empty if the client gave tokens), and the names of its blocks
    prompts: Sequence[tuple[list[int], str, BlockNames]]
    group: EndpointGroup  # the workers of the request's lineage at its admission
    tokens: Tokens  # the tokenizer of these workers
    formats: OutputFormats  # the formats of the model's reasoning and tool calls
    constraint: Constraint | None  # the request's constraint as a grammar, if it has one
    bad_words: list[
        list[int]
    ]  # the request's bad words as tokens; empty if an external server tokenizes them
    serial: int  # serial number in this frontend, which seeds sampling if the client sets no seed
    # deadline of the first token by the frontend's monotonic clock; None without admission by deadlines
    first_token_by: float | None = None

    @property
    def repeatable(self) -> bool:
        """Whether an answer gets the same tokens if another healthy worker continues it.

        An external server that continues an answer receives the tokens so far as a part of the prompt. The server
        restarts its random numbers. It applies presence and frequency penalties, and bad words, only to the tokens
        that it generates itself. So this is false for external servers, unless sampling is greedy and without these.
        """
        asked = self.call.parsed.sampling
        counts = asked.presence_penalty or asked.frequency_penalty or asked.bad_words
        return (asked.temperature == 0 and not counts) or self.group.engine != "openai"

    def grammar(self, prompt: str) -> AnswerGrammar | None:
        """Return the grammar that constrains an answer to this prompt, or None if there is none."""
        if self.constraint is None:
            return None
        reasoning = self.formats.reasoning
        if reasoning is None:
            return AnswerGrammar(constraint=self.constraint)
        return AnswerGrammar(
            constraint=self.constraint,
            reasoning_start=reasoning.start,
            reasoning_end=reasoning.end,
            in_reasoning=reasoning.begins_in_reasoning(prompt),
        )

    def sampling(self, prompt_tokens: int, choice: int) -> Sampling:
        """Return the sampling parameters for the answer with the index `choice`.

        Parameters that the client left out are set to the defaults in the model's folder. With the openai engine they
        are left to the external server. Raise ApiError (400) if the request exceeds the context, or if its limits
        contradict each other.
        """
        parsed, external = self.call.parsed, self.group.engine == "openai"
        asked, of_prompt = parsed.sampling, parsed.logprobs_of_prompt
        given = None if external else self.tokens.defaults
        defaults = {name: given[name] for name in asked.unset if name in given} if given else {}
        seed = asked.seed
        if asked.temperature > 0:
            # with Holdfast's own engines, a seed lets the random numbers continue after a migration
            if seed is None and not external:
                seed = self.serial * 2_654_435_761 & (1 << SEED_BITS) - 1
            seed = None if seed is None else seed + choice
        return msgspec.structs.replace(
            asked,
            max_tokens=answer_tokens(parsed, prompt_tokens, self.group),
            seed=seed,
            # the logprobs of a prompt arrive together with those of the first token
            logprobs=0 if parsed.logprobs is of_prompt is None else max(1, parsed.logprobs or 0),
            prompt_logprobs=of_prompt,
            unset=asked.unset if external else [],
            bad_words=asked.bad_words if external else [],
            bad_word_tokens=self.bad_words,
            **defaults,
        )


class Completion:
    """A client's request with its answers, and the response that is built from the answers."""

    def __init__(
        self, admitted: AdmittedRequest, stream: SseStream | None, priority: int, migration_limit: int
    ) -> None:
        """Create the answers without sending them to workers.

        `stream` is None for a response that is not streamed. `priority` orders the answers at a worker; 0 is the best.
        `migration_limit` is the number of attempts of each answer beyond the first. Raise ApiError (400) if the
        request exceeds the context.
        """
        call = admitted.call
        parsed = call.parsed
        fingerprint = system_fingerprint(parsed.model, *admitted.lineage)
        model = OutputModel(admitted.tokens, admitted.formats, fingerprint)
        self.format = FORMATS[parsed.api](call, model, stream)
        self.stream = stream
        self.over: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        self.answers: list[Choice] = []
        forbidden = "n_over_1" if parsed.n > 1 else ""
        if parsed.guided and admitted.constraint is None:
            forbidden = forbidden or "guided_decoding"
        if parsed.proxied is not None:
            forbidden = "proxied"
        for prompt, text, names in admitted.prompts:
            for choice in range(parsed.n):
                request = GenerationRequest(
                    id=call.id,
                    model=parsed.model,
                    lineage=admitted.lineage,
                    prompt=prompt,
                    prompt_text=text,
                    sampling=admitted.sampling(len(prompt), choice),
                    guided=parsed.guided,
                    grammar=None if parsed.guided is None else admitted.grammar(text),
                    deterministic=admitted.repeatable,
                    names=names,
                    tier=call.head.tier,
                    priority=priority,
                    arrived=call.arrived,
                    first_token_by=admitted.first_token_by,
                    cache_salt=parsed.cache_salt,
                    proxied=parsed.proxied,
                    adapter=parsed.adapter,
                    overrides=call.head.overrides,
                    traceparent=call.head.trace,
                )
                accepted: list[int] = []
                writer = self.format.writer(len(self.answers), prompt, text, accepted)
                self.answers.append(Choice(request, writer, migration_limit, forbidden, accepted))
        self._left = len(self.answers)
        if stream is not None:
            stream.answers = self.answers

    # --- the end ------------------------------------------------------------------------------------------

    def ended(self, answer: Choice) -> None:
        """Record that one answer has ended. End the response if all answers have ended or this answer has failed."""
        self._left -= 1
        if answer.error is not None:
            self.finish(answer.error)
        elif self._left == 0 and answer.finish != "cancelled":
            self.finish(None)

    def finish(self, error: ApiError | None) -> None:
        """End the response: with this error, or successfully if `error` is None."""
        if self.over.done():
            return
        self.over.set_result(error)
        stream = self.stream
        if stream is None:
            return
        if error is not None and not stream.started:
            stream.parts.clear()
        elif error is not None:
            stream.end(self.format.failed(error, self.answers))
        else:
            if any(not answer.exact for answer in self.answers):
                stream.parts.append(INEXACT)
            stream.end(self.format.last(self.answers))

    def whole(self) -> WholeResponse:
        """Return the response to a request that is not streamed."""
        return self.format.whole(self.answers)


@lru_cache(FINGERPRINTS_KEPT)
def system_fingerprint(model: str, revision: str, tokenizer: str) -> str:
    """Return the `system_fingerprint` of a model: it changes with the model's revision and its tokenizer."""
    return f"fp_{hashlib.sha256(repr((model, revision, tokenizer)).encode()).hexdigest()[:FINGERPRINT_CHARS]}"


def answer_tokens(parsed: ParsedRequest, prompt_tokens: int, group: EndpointGroup) -> int:
    """Return the maximum number of tokens of the answer to a prompt of this length.

    Raise ApiError (400) if no worker of the group has enough context for the request, if `min_tokens` exceeds
    `max_tokens`, or if an echo would have too many logprobs.
    """
    context, wanted = group.context_tokens, parsed.max_tokens
    room = context - prompt_tokens
    if room < 1:
        raise too_long(prompt_tokens, context, "messages" if parsed.chat else "prompt")
    if wanted is None:
        wanted = group.answer_room(prompt_tokens)
        wanted = wanted if parsed.chat else min(wanted, COMPLETION_TOKENS_DEFAULT)
    if wanted > room:
        message = f"{prompt_tokens} prompt tokens and max_tokens {wanted} are more than the model's context {context}"
        raise invalid(message, "max_tokens", "context_length_exceeded")
    of_prompt = parsed.logprobs_of_prompt
    if of_prompt is not None and prompt_tokens * (of_prompt + 1) > ECHOED_LOGPROBS_MAX:
        why = f"{prompt_tokens} prompt tokens with {of_prompt + 1} each are more than {ECHOED_LOGPROBS_MAX}"
        field = "logprobs" if of_prompt == parsed.logprobs and parsed.echo else "prompt_logprobs"
        raise invalid(f"{field}: {why}", field)
    least = parsed.sampling.min_tokens
    if least > wanted:
        raise invalid(f"min_tokens {least} is more than max_tokens {wanted}", "min_tokens")
    # at least one token must be generated, because the prompt's logprobs arrive with a token
    return wanted if of_prompt is None else max(1, wanted)


def refuse_unsupported(parsed: ParsedRequest, group: EndpointGroup) -> None:
    """Raise ApiError (400) if the workers do not support an option of the request: logprobs or token ids."""
    for name, wanted in (
        ("logprobs", parsed.logprobs is not None),
        ("prompt_logprobs", parsed.prompt_logprobs is not None),
        ("return_token_ids", parsed.token_ids),
        ("add_special_tokens", parsed.special_tokens not in (None, not parsed.chat)),
    ):
        if wanted and group.text_only:
            raise unsupported(name, "this model's servers return text only")


async def read_prompts(
    parsed: ParsedRequest, tokens: Tokens, context: int, intake: Intake
) -> list[tuple[list[int], str]]:
    """Return each prompt as tokens and as text.

    The text is empty if the client gave token ids or requested truncated prompts. `context` is the model's context
    length in tokens; a prompt must be shorter. Raise ApiError: 400 if a prompt is invalid, 503 if too much text waits
    to be tokenized. Raise BadTemplate if the chat template refuses the messages.
    """
    sampling, chat = parsed.sampling, parsed.messages is not None
    for name, named in (
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids),
    ):
        if named and (highest := max(named)) >= tokens.size:
            raise invalid(f"{name}: the token {highest} is not below {tokens.size}", name)
    prompts = [rendered(parsed, tokens.template)] if chat else parsed.prompts or []
    for prompt in prompts:
        if isinstance(prompt, str):
            if parsed.truncate is None:
                _check_length(prompt, tokens, context, intake, "messages" if chat else "prompt")
            else:
                _check_truncated(prompt, context, intake)
    # A request with a cache salt does not share cached text, because its tokenization time would reveal whether the
    # text was seen before.
    shared, threads, out = not parsed.cache_salt, intake.long_texts, []
    for prompt in prompts:
        if isinstance(prompt, str):
            special = not chat if parsed.special_tokens is None else parsed.special_tokens
            read = await tokens.encode_soon(prompt, threads, special=special, shared=shared)
            if parsed.truncate is None:
                out.append((read, prompt))
            else:
                out.append((_truncated(read, parsed, context), ""))
        else:
            given = prompt if parsed.truncate is None else _truncated(prompt, parsed, context)
            out.append((_token_ids(given, tokens.size, context), ""))
    if not all(prompt for prompt, _ in out):
        name = "prompt" if parsed.truncate is None else "truncate_prompt_tokens"
        raise invalid(f"{name}: the prompt has no tokens", "messages" if chat and name == "prompt" else name)
    return out


def rendered(parsed: ParsedRequest, template: ChatTemplate | None) -> str:
    """Return a chat as a prompt, rendered by the model's chat template.

    Raise ApiError (400) if the model has no template. Raise BadTemplate if the template refuses the messages.
    """
    if template is None:
        message = "this model has no chat template; use /v1/completions"
        raise invalid(message, "messages", "no_chat_template")
    render = template.render_continued if parsed.continues else template.render
    return render(parsed.messages or (), **(parsed.template_extra or {}))


def _truncated(prompt: list[int], parsed: ParsedRequest, context: int) -> list[int]:
    """Return as many tokens of a prompt as the client requested: its last ones, or its first ones.

    If the requested number is negative, return as many as fit into the context together with `max_tokens`.
    """
    most = parsed.truncate or 0
    if most < 0:
        most = context - (parsed.max_tokens or 1)
    if most <= 0:
        return []
    return prompt[:most] if parsed.keeps_start else prompt[-most:]


def _check_truncated(text: str, context: int, intake: Intake) -> None:
    """Raise ApiError (400) if a text is too long to be tokenized as a whole, only to use its last tokens.

    The tail alone could have other tokens, because a token depends on the text before it.
    """
    most = max(TEXT_CHARS_MAX, TRUNCATED_CHARS_PER_TOKEN * context)
    if len(text) > most:
        intake.bounds.count("text_length")
        why = f"a text that is truncated may have {most} characters, not {len(text)}"
        raise invalid(f"truncate_prompt_tokens: {why}", "truncate_prompt_tokens")


def _check_length(text: str, tokens: Tokens, context: int, intake: Intake, param: str) -> None:
    """Raise ApiError (400), which names the field `param`, if a text is certainly too long for the context.

    Such a text is not tokenized, because that would take a second per megabyte.
    """
    if len(text) < context:  # the common case: a token has at least one character
        return
    least = tokens.tokens_min(text, context - 1)
    if least >= context:
        intake.bounds.count("text_length")
        raise too_long(least, context, param, least=True)


def _token_ids(given: list[int], size: int, context: int) -> list[int]:
    """Return a prompt of token ids unchanged. Raise ApiError (400) if it is not valid.

    A prompt that is too long is refused before its ids are checked, because checking millions would block the event
    loop.
    """
    if len(given) >= context:
        raise too_long(len(given), context, "prompt")
    if not all(type(token) is int for token in given):
        raise invalid("prompt must be text, token ids, or a list of these", "prompt")
    if not all(0 <= token < size for token in given):
        raise invalid(f"a token of the prompt is below zero, or not below {size}", "prompt")
    return given
