"""Parses the request bodies of all endpoints, and refuses known but unsupported fields.

Chat and completion bodies are parsed into one `ParsedRequest`. Unknown fields are accepted with a warning, because
clients send fields that are meant for other servers. Known but unsupported fields that would change the answer are
refused (`request_models.py` has the tables).
"""

from collections.abc import Container, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct
from pydantic import BaseModel, ValidationError

from controller.frontend.errors import ApiError, invalid, quoted, unsupported
from controller.frontend.openai import request_models as models
from events.grammar.constraint import NO_PARAMETERS, schema_of_required_tools
from events.grammar.refusals import GrammarRefused
from events.wire import ProxiedRequest, Sampling

B = TypeVar("B", bound=BaseModel)
Api = Literal["chat", "completions", "messages", "responses", "proxied"]
ToolChoice = Literal["auto", "required", "named"]
DEFAULTED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Sampling fields for which a model may have its own defaults."""
_PLAIN_UNSET = {
    (False, False): [*DEFAULTED],
    (True, False): [*DEFAULTED[1:]],
    (False, True): [DEFAULTED[0], *DEFAULTED[2:]],
    (True, True): [*DEFAULTED[2:]],
}
"""The unset fields of a plain chat, by whether it has a temperature and a top_p. A table, because it is read per request."""
SAMPLING = {
    *DEFAULTED, "min_tokens", "seed", "ignore_eos", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words",
}  # fmt: skip
"""Fields that have the same name and meaning in a request body and in `Sampling`."""


class ToolUse(Struct, frozen=True):
    """The functions that an answer may call."""

    schemas: dict[str, models.Json]  # the JSON schema of each function's arguments, by the function's name
    choice: ToolChoice
    name: str = ""  # of the function to call, if the choice is `named`
    parallel: bool = True  # whether an answer may have several calls


class ResponseOptions(Struct, frozen=True):
    """What a request of the Responses API states about its response."""

    shown: models.Json  # the fields of the request that the response repeats
    previous: str = ""  # id of the stored response that this one continues; empty if there is none
    store: bool = True  # whether the response is kept for later requests
    instructed: bool = False  # whether the first message consists of the request's instructions
    id: str = ""  # of the response
    owner: str = ""  # name of the client's API key; empty without API keys


class ParsedRequest(Struct, kw_only=True, frozen=True):
    """A parsed request for an answer, in one form for all APIs."""

    api: Api = "chat"
    model: str
    adapter: str = ""  # the LoRA adapter that the client has named; `model` is the adapter's model
    called: str = ""  # the adapter or alias that the client has named; empty if it names the model
    stream: bool
    include_usage: bool  # include the usage in the last event of a stream
    n: int = 1
    max_tokens: int | None = None  # None if the endpoint's default applies
    # Fields that the client left out have their defaults and are listed in `unset`. Fields that depend on the prompt
    # are set later.
    sampling: Sampling
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # keep the stop string at the end of the answer
    truncate: int | None = None  # tokens of the prompt that are used; -1: as many as fit
    logprobs: int | None = None  # number of top tokens shown; None if no logprobs are requested
    prompt_logprobs: int | None = (
        None  # number of top tokens with each token of the prompt; None if not requested
    )
    logprobs_by_id: bool = False  # whether tokens in logprobs are named by their ids
    # rarely used options that add details to an answer's text
    echo: bool = False  # return the prompt before the text
    echo_text: str = ""  # of a chat: the text to return before the answer
    prompt_text: bool = False  # return the prompt that the chat template has written
    special_tokens: bool | None = (
        None  # add the tokenizer's special tokens to prompts; None: the endpoint's default
    )
    token_ids: bool = False
    special: bool = False  # show special tokens by their names
    continuous_usage: bool = False  # include the usage so far in every event
    guided: models.Json | None = None
    cache_salt: str = ""  # cached prefixes are shared only with requests that have the same salt
    tool_use: ToolUse | None = None  # None if the answer must not call a function
    include_reasoning: bool = True  # whether the client receives the reasoning
    messages: list[models.Json] | None = None  # of a chat
    continues: bool = False  # whether the answer continues the last message
    template_extra: models.Json | None = None  # variables for the chat template
    # by field: the variables of which the chat template must read one, because otherwise the field has no effect
    template_reads: dict[str, tuple[str, ...]] = {}
    unknown: tuple[str, ...] = ()  # unknown fields of the body
    prompts: list[str | list[int]] | None = None  # of a completion, each with its own answers
    user: str = ""  # the end user, as named in the body
    response: ResponseOptions | None = None  # of the Responses API
    # the HTTP request to pass on to a server unchanged; None: this frontend builds the prompt
    proxied: ProxiedRequest | None = None

    @property
    def served(self) -> str:
        """The name of the adapter or, without one, of the model: see `EndpointTable`."""
        return self.adapter or self.model

    @property
    def chat(self) -> bool:
        """Whether this frontend builds the prompt from a conversation."""
        return self.api not in ("completions", "proxied")

    @property
    def detailed(self) -> bool:
        """Whether answers contain the prompt or its logprobs, token ids, or the token usage in each event."""
        prompt = self.echo or self.echo_text or self.prompt_text or self.prompt_logprobs is not None
        return bool(prompt) or self.token_ids or self.continuous_usage

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the echo contains the logprobs of the prompt."""
        return self.echo and self.logprobs is not None

    @property
    def logprobs_of_prompt(self) -> int | None:
        """Number of top tokens that are needed with each token of the prompt; None if no logprobs of it are needed."""
        if self.echoes_logprobs:
            return max(self.logprobs or 0, self.prompt_logprobs or 0)
        return self.prompt_logprobs

    @property
    def silent(self) -> bool:
        """Whether the client requests only the prompt, with `max_tokens: 0`.

        If the logprobs of the prompt are requested, one token is generated to obtain them, but is not shown.
        """
        return self.max_tokens == 0


class TokenizeRequest(Struct, kw_only=True, frozen=True):
    """A parsed body of /tokenize, which contains either a text or a conversation."""

    model: str | None
    text: str | None = None  # None if messages are given
    messages: list[models.Json] = []
    template_names: models.Json = {}  # variables for the chat template
    special: bool
    token_strs: bool
    unknown: tuple[str, ...] = ()


class DetokenizeRequest(Struct, kw_only=True, frozen=True):
    """A parsed body of /detokenize."""

    model: str | None
    tokens: list[int]
    unknown: tuple[str, ...] = ()


USER_CHARS_MAX = 128
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
FORMS = ("text", "json_object", "json_schema")
_plain = msgspec.json.Decoder(models.PlainChat)


def read_chat(body: bytes) -> ParsedRequest:
    """Parse a chat body. If a field is invalid, raise ApiError (400) that names the field."""
    plain = plain_chat(body)
    return _from_plain(plain) if plain is not None else parse_any_chat(read_json(body))


def read_json(body: bytes) -> object:
    """Decode a JSON body. Raise ApiError (400) if the body is not JSON."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_json(str(error)) from error


def parse_any_chat(data: object) -> ParsedRequest:
    """Parse a decoded chat body that may have any field. If a field is invalid, raise ApiError (400) that names the field."""
    body = validated(models.ChatBody, data)
    unknown = refuse(body.model_extra, models.REFUSED_BY_CHAT)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if body.continue_final_message and body.add_generation_prompt is not False:
        why = "continue_final_message needs add_generation_prompt: false"
        raise invalid(why, "continue_final_message")
    extra = dict(body.chat_template_kwargs or {})
    if body.tools:
        extra.setdefault("tools", [tool.model_dump(exclude_unset=True) for tool in body.tools])
        if body.tool_choice is not None:
            extra.setdefault("tool_choice", body.tool_choice)
    if body.documents:
        extra.setdefault("documents", body.documents)
    if body.add_generation_prompt is not None:
        extra["add_generation_prompt"] = body.add_generation_prompt
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    tool_use = _tool_use(body)
    messages = [plain_message(place, message) for place, message in enumerate(body.messages)]
    return _parsed(
        body,
        unknown,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tool_use=tool_use,
        include_reasoning=body.include_reasoning is not False,
        messages=messages,
        echo_text=_text_of(messages[-1]) if body.echo and messages[-1]["role"] == "assistant" else "",
        prompt_text=bool(body.return_prompt_text),
        continues=bool(body.continue_final_message),
        template_extra=extra or None,
        template_reads={} if body.reasoning_effort is None else {"reasoning_effort": ("reasoning_effort",)},
    )


def _tool_use(body: models.ChatBody) -> ToolUse | None:
    """Return the functions that the answer may call, or None if it must not call any.

    Raise ApiError (400) if the choice is not valid, or if it does not fit the tools.
    """
    choice, functions = body.tool_choice, [tool.function for tool in body.tools or ()]
    if choice == "none" or (not functions and choice in (None, "auto")):
        return None
    if not functions:
        raise invalid("tool_choice: the request has no tools", "tool_choice")
    schemas = {function.name: function.parameters or {} for function in functions}
    if len(schemas) < len(functions):
        raise invalid("tools: two functions have the same name", "tools")
    parallel = body.parallel_tool_calls is not False
    if choice in (None, "auto"):
        return ToolUse(schemas, "auto", parallel=parallel)
    if choice == "required":
        return ToolUse(schemas, "required", parallel=parallel)
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        why = (
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
        )
        raise invalid(why, "tool_choice")
    if name not in schemas:
        raise invalid(f"tool_choice: there is no function {quoted(name)!r} among the tools", "tool_choice")
    return ToolUse(schemas, "named", name, parallel)


def parse_completion(data: object) -> ParsedRequest:
    """Parse a decoded completions body. If a field is invalid, raise ApiError (400) that names the field."""
    body = validated(models.CompletionBody, data)
    unknown = refuse(body.model_extra, models.REFUSED_BY_COMPLETIONS)
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens: 0 is only allowed with echo: true", "max_tokens")
    prompts = _prompts(body.prompt)
    parsed = _parsed(
        body,
        unknown,
        api="completions",
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompts=prompts,
        echo=bool(body.echo),
    )
    if len(prompts) * parsed.n > models.N_MAX:
        raise invalid(f"prompts times n is more than {models.N_MAX}", "prompt")
    return parsed


def _from_plain(chat: models.PlainChat) -> ParsedRequest:
    options = chat.stream_options
    return ParsedRequest(
        model=chat.model,
        stream=chat.stream,
        include_usage=options is not None and options.include_usage,
        max_tokens=chat.max_completion_tokens or chat.max_tokens,
        sampling=Sampling(
            0,
            temperature=1.0 if chat.temperature is None else chat.temperature,
            top_p=1.0 if chat.top_p is None else chat.top_p,
            seed=chat.seed,
            ignore_eos=chat.ignore_eos,
            unset=_PLAIN_UNSET[chat.temperature is not None, chat.top_p is not None],
        ),
        messages=[{"role": message.role, "content": message.content} for message in chat.messages],
    )


def _parsed(body: models.RequestBody, unknown: tuple[str, ...], **own: Any) -> ParsedRequest:
    """Build a ParsedRequest from a validated body. Raise ApiError (400) if fields contradict each other.

    `own` contains the fields of the result in which chats and completions differ.
    """
    options = body.stream_options or models.StreamOptions()
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs: not with stream: true", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only with stream: true", "stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        raise invalid("stream_options: continuous_usage_stats needs include_usage: true", "stream_options")
    guided, calls = _guided(body), _guided_calls(own.get("tool_use"))
    if guided and calls:
        raise invalid(f"tool_choice: {next(iter(guided))} constrains the answer already", "tool_choice")
    named = (f"stream_options.{name}" for name in options.model_extra or ())
    user = (body.model_extra or {}).get("user")
    return ParsedRequest(
        model=body.model,
        stream=body.stream,
        include_usage=options.include_usage,
        n=body.n or 1,
        sampling=_sampling(body),
        stop=_stops(body.stop),
        include_stop=body.include_stop_str_in_output,
        truncate=body.truncate_prompt_tokens,
        prompt_logprobs=body.prompt_logprobs,
        special_tokens=body.add_special_tokens,
        logprobs_by_id=bool(body.return_tokens_as_token_ids),
        token_ids=bool(body.return_token_ids),
        special=body.skip_special_tokens is False,
        continuous_usage=options.continuous_usage_stats,
        guided=guided or calls,
        cache_salt=body.cache_salt or "",
        unknown=(*unknown, *(name for name in named if name not in models.IGNORED)),
        user=user[:USER_CHARS_MAX] if isinstance(user, str) else "",
        **own,
    )


def _sampling(body: models.RequestBody) -> Sampling:
    given: dict[str, Any] = {"max_tokens": 0, "temperature": 1.0}
    given |= {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    given["top_k"] = max(0, body.top_k or 0)
    given["logit_bias"] = {int(token): bias for token, bias in (body.logit_bias or {}).items() if bias}
    return Sampling(**given, unset=[name for name in DEFAULTED if getattr(body, name) is None])


def _stops(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list):
        raise invalid("stop must be text or a list of texts", "stop")
    if len(stops) > models.STOPS_MAX:
        raise invalid(f"at most {models.STOPS_MAX} stop strings", "stop")
    if not all(isinstance(text, str) for text in stops):
        raise invalid("stop must be text or a list of texts", "stop")
    if not all(stops):
        raise invalid("a stop string must not be empty", "stop")
    if (chars := sum(map(len, stops))) > models.STOP_CHARS_MAX:
        why = f"stop strings may have {models.STOP_CHARS_MAX} characters together, not {chars}"
        raise invalid(why, "stop")
    return tuple(stops)


def _guided(body: models.RequestBody) -> models.Json | None:
    """Return the constraint on the answer's form, or None if there is none.

    The result has one entry: the name and value of the field that contains the constraint. Raise ApiError (400) if
    more than one field constrains the answer, or if the type of `response_format` is unknown.
    """
    found = {name: value for name in GUIDED if (value := getattr(body, name)) is not None}
    wanted = body.response_format
    if wanted is not None:
        if wanted.get("type") not in FORMS:
            why = f"response_format.type must be {', '.join(FORMS[:-1])} or {FORMS[-1]}"
            raise invalid(why, "response_format")
        if wanted["type"] != "text":
            found["response_format"] = wanted
    if len(found) > 1:
        first, second, *_ = found
        raise invalid(f"{second}: only one field may constrain the answer, and {first} is given", second)
    return found or None


def _guided_calls(use: ToolUse | None) -> models.Json | None:
    """Return the constraint that forces an answer to call a function, or None if the answer need not call one.

    Raise ApiError (400) if the schemas of the functions contradict each other.
    """
    if use is None or use.choice == "auto":
        return None
    if use.choice == "named":
        return {"structured_outputs": {"json": use.schemas[use.name] or NO_PARAMETERS}}
    try:
        return {"structured_outputs": {"json": schema_of_required_tools(use.schemas)}}
    except GrammarRefused as refused:
        raise invalid(f"tools: {refused}", "tools") from refused


def plain_message(place: int, message: models.ChatMessage) -> models.Json:
    """Return a message for the chat template, with its content as text or as text parts.

    `place` is the message's index. Raise ApiError (400) if the message is invalid.
    """
    extra, given, where = message.model_extra or {}, message.content, f"messages.{place}.content"
    content = [_text_part(part, where) for part in given] if isinstance(given, list) else given
    calls = message.role == "assistant" and (extra.get("tool_calls") or extra.get("function_call"))
    if not calls and (content is None or (content == [] and message.role != "tool")):
        why = "a message must have content; only an assistant's with tool_calls may have none"
        raise invalid(f"{where}: {why}", where)
    return {"role": message.role, **extra, "content": content or ""}


def _text_of(message: models.Json) -> str:
    """Return the text of a message. Its parts are joined with newlines, as for the chat template."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)  # type: ignore[attr-defined]


def _text_part(part: models.Part, where: str) -> dict[str, str]:
    if part.type != "text" or part.text is None:
        raise unsupported(where, f"parts of type {quoted(part.type)!r}")
    return {"type": "text", "text": part.text}


def _prompts(prompt: object) -> list[str | list[int]]:
    """Return the prompts of a completion request as a list.

    Token ids are not checked here, but later, once the length of their prompt is known to fit.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid("prompt must be text, token ids, or a list of these", "prompt")
    if not prompt:
        raise invalid("prompt must not be empty", "prompt")
    if type(prompt[0]) is int:
        return [prompt]
    if len(prompt) > models.N_MAX:
        raise invalid(f"at most {models.N_MAX} prompts", "prompt")
    if not any(all(isinstance(one, kind) for one in prompt) for kind in (str, list)):
        raise invalid("prompt must be text, token ids, or a list of these", "prompt")
    return list(prompt)


def plain_chat(body: bytes) -> models.PlainChat | None:
    """Parse a chat body without unusual fields. Return None if the body has other fields or is not JSON."""
    try:
        found = _plain.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if found.stream_options is not None and not found.stream else found


def parse_tokenize(data: object) -> TokenizeRequest:
    """Parse a decoded body of /tokenize. If a field is invalid, raise ApiError (400) that names the field."""
    given = data if isinstance(data, dict) else {}
    chat = "messages" in given
    if chat and "prompt" in given:
        raise invalid("give either prompt or messages", "prompt")
    body = validated(models.TokenizeChatBody, data) if chat else validated(models.TokenizePromptBody, data)
    unknown = refuse(body.model_extra, models.REFUSED_BY_TOKENIZE)
    text, messages, names = None, [], models.Json()
    if isinstance(body, models.TokenizePromptBody):
        text = body.prompt
    else:
        names = {"tools": body.tools} if body.tools else {}
        names |= body.chat_template_kwargs or {}
        names["add_generation_prompt"] = body.add_generation_prompt
        messages = [plain_message(place, message) for place, message in enumerate(body.messages)]
    return TokenizeRequest(
        model=body.model,
        text=text,
        messages=messages,
        template_names=names,
        special=body.add_special_tokens,
        token_strs=bool(body.return_token_strs),
        unknown=unknown,
    )


def parse_detokenize(data: object) -> DetokenizeRequest:
    """Parse a decoded body of /detokenize. If a field is invalid, raise ApiError (400) that names the field."""
    asked = validated(models.DetokenizeBody, data)
    return DetokenizeRequest(model=asked.model, tokens=asked.tokens, unknown=refuse(asked.model_extra, {}))


def validated(model: type[B], data: object) -> B:
    """Validate a decoded body with this model. If a field is invalid, raise ApiError (400) that names the field."""
    if not isinstance(data, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        place = [step for step in found[0]["loc"] if not _is_type(step)]
        same = [one for one in found if list(one["loc"][: len(place)]) == place]
        first = same[-1]  # of a union, the error in the list is reported, not that the value is no text
        where = [str(step) for step in first["loc"] if not _is_type(step)]
        field = quoted(".".join(where))  # names in a mapping are client input
        raise invalid(f"{field}: {first['msg']}", quoted(where[0]) if where else None) from error


def _is_type(step: int | str) -> bool:
    """Return whether a step of pydantic's error path names a branch of a union. Such a step means nothing to a client."""
    return isinstance(step, str) and (step in ("str", "int") or "[" in step)


def refuse(
    extra: Mapping[str, object] | None, refused: models.Harmless, ignored: Container[str] = models.IGNORED
) -> tuple[str, ...]:
    """Return the names of the unknown fields in `extra`: those that are neither in `refused` nor in `ignored`.

    `refused` maps each refused field to its harmless values, which change nothing. Raise ApiError (400) for the first
    refused field in `extra` with any other value.
    """
    given = extra or {}
    for name, value in given.items():
        if name in refused and value not in refused[name]:
            raise unsupported(name)
    return tuple(name for name in given if name not in refused and name not in ignored)


def bad_json(why: str) -> ApiError:
    """Return the 400 error for a body that is not JSON."""
    return invalid(f"the body is not JSON: {why}", code="invalid_json")
