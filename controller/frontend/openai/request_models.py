"""Models of request bodies, and the tables of refused and ignored fields.

`/openapi.json` is generated from the models. A field that is not in a model is looked up in the tables, from which
docs/reference/api.md is generated:

    REFUSED_BY_…   would change the answer but is not supported: refused by name, except with values that change nothing
    IGNORED        changes no answer: accepted
    neither        accepted, and listed in the response header `Warning`
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from controller.deciders.thresholds import BusyThresholds

STOPS_MAX = 16
# characters of all stop strings together, which is also the maximum text held back from a stream
STOP_CHARS_MAX = 4_096
N_MAX = 16
TOP_LOGPROBS_MAX = 20
MESSAGES_MAX = 10_000  # reading a million would block the event loop
PARTS_MAX = 1_000
STOP_IDS_MAX = 1_000
LOGIT_BIAS_MAX = 1_024
ALLOWED_TOKENS_MAX = 4_096
BAD_WORDS_MAX = 64
BAD_WORD_CHARS_MAX = 64
TOOLS_MAX = 128
FUNCTION_NAME_MAX = 256
DOCUMENTS_MAX = 1_000
SALT_CHARS_MAX = 256
TEXT_CHARS_MAX = 2**20  # characters of a text in /tokenize
TOKENS_MAX = 2**18  # tokens in /detokenize: about four times as many characters

Json = dict[str, object]
Count = Annotated[int, Meta(ge=1)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
BadWord = Annotated[str, Field(pattern=r"\S", max_length=BAD_WORD_CHARS_MAX)]
TokenName = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$", description="a token id")]


def option(description: str, default: object = None, **bounds: Any) -> Any:
    """Return an optional field with this description, default and limits."""
    return Field(default, description=description, **bounds)


def _check_size(bias: object) -> object:
    """Refuse a mapping with too many entries before any entry is validated."""
    if isinstance(bias, dict) and len(bias) > LOGIT_BIAS_MAX:
        raise ValueError(f"at most {LOGIT_BIAS_MAX} tokens")
    return bias


def _read_later(*schemas: Json) -> WithJsonSchema:
    """Return the JSON schema of a field that the model accepts unchecked and the parser validates later.

    The parser checks the length of such a field before its content.
    """
    return WithJsonSchema({"anyOf": [*schemas, {"type": "null"}]})


_TEXT: Json = {"type": "string", "minLength": 1}
_NAMED_TOOL: Json = {
    "type": "object",
    "properties": {
        "type": {"enum": ["function"]},
        "function": {"type": "object", "properties": {"name": _TEXT}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_TOKENS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STOP = {**_TEXT, "maxLength": STOP_CHARS_MAX}
_STOPS = {"type": "array", "items": _STOP, "maxItems": STOPS_MAX}
_PROMPTS = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": N_MAX}
_TOKEN_PROMPTS = {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": N_MAX}


class Lenient(BaseModel):
    """A part of a body. Unknown fields are kept, so that they can be reported."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Lenient):
    """Options of a streamed response."""

    include_usage: bool = option("add a final event with the usage", False)
    continuous_usage_stats: bool = option("add the usage so far to every event; needs include_usage", False)


class RequestBody(Lenient):
    """Fields common to chat and completion requests."""

    model: str = option("a name listed by /v1/models; optional if only one model is served", "")
    stream: bool = option("send an event for each token instead of the whole answer", False)
    stream_options: StreamOptions | None = option(
        "include_usage, continuous_usage_stats; only with stream: true"
    )
    max_tokens: int | None = option("maximum tokens of the answer", ge=1)
    min_tokens: int | None = option("minimum tokens of the answer", ge=0)
    temperature: float | None = option(
        "sampling temperature; 0: always the most likely token; default 1", ge=0, le=2, allow_inf_nan=False
    )
    top_p: float | None = option("sample from the most likely tokens with this total probability", gt=0, le=1)
    top_k: int | None = option("sample from this many most likely tokens; 0, -1: all", ge=-1, lt=2**31)
    min_p: float | None = option(
        "sample from tokens with at least this share of the highest probability", ge=0, le=1
    )
    seed: int | None = option("seed for reproducible sampling", ge=-(2**63), lt=2**63)
    stop: Annotated[object, _read_later(_STOP, _STOPS)] = option(
        f"a text that ends the answer, or at most {STOPS_MAX} texts with {STOP_CHARS_MAX:,} characters in total"
    )
    stop_token_ids: list[Token] | None = option("tokens that end the answer", max_length=STOP_IDS_MAX)
    include_stop_str_in_output: bool = option("keep the stop string at the end of the answer", False)
    truncate_prompt_tokens: int | None = option(
        "use only this many tokens of the prompt, its last ones; -1: as many as fit", ge=-1, lt=2**31
    )
    n: int | None = option("number of answers to each prompt", ge=1, le=N_MAX)
    ignore_eos: bool = option("continue after the end-of-sequence token", False)
    cache_salt: str | None = option(
        "share cached prefixes only with requests that have the same salt",
        min_length=1,
        max_length=SALT_CHARS_MAX,
    )
    presence_penalty: float | None = option(
        "subtracted from the logits of tokens that occur in the answer", ge=-2, le=2
    )
    frequency_penalty: float | None = option(
        "subtracted from the logits of such tokens once per occurrence", ge=-2, le=2
    )
    repetition_penalty: float | None = option(
        "divides the logits of tokens that occur in the prompt or the answer; 1: no effect", gt=0, le=10
    )
    logit_bias: Annotated[dict[TokenName, Bias] | None, BeforeValidator(_check_size)] = option(
        "by token id: value added to its logit", max_length=LOGIT_BIAS_MAX
    )
    allowed_token_ids: list[Token] | None = option(
        "generate only these tokens", min_length=1, max_length=ALLOWED_TOKENS_MAX
    )
    bad_words: list[BadWord] | None = option(
        "texts that the answer must not contain, as the tokenizer writes them at the beginning and after a space",
        max_length=BAD_WORDS_MAX,
    )
    add_special_tokens: bool | None = option(
        "include the special tokens that the tokenizer adds to a text; default: false in a chat, otherwise true"
    )
    prompt_logprobs: int | None = option(
        "return the logprobs of each token of the prompt and of this many most likely tokens; not with stream: true",
        ge=0,
        le=TOP_LOGPROBS_MAX,
    )
    skip_special_tokens: bool | None = option("false: show special tokens by their names; default true")
    return_token_ids: bool | None = option("return token_ids with the text, and prompt_token_ids")
    return_tokens_as_token_ids: bool | None = option('show the tokens of logprobs as "token_id:N"')
    response_format: Json | None = option("format of the answer: type text, json_object or json_schema")
    structured_outputs: Json | None = option(
        "format of the answer, in vLLM's form: json, regex, choice, grammar …"
    )
    guided_json: Json | str | None = option("structured_outputs.json")
    guided_regex: str | None = option("structured_outputs.regex")
    guided_choice: list[str] | None = option("structured_outputs.choice")
    guided_grammar: str | None = option("structured_outputs.grammar")


class Part(Lenient):
    """One part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(Lenient):
    """One message of a conversation. Additional fields are passed to the chat template."""

    role: str
    content: str | Annotated[list[Part], Field(max_length=PARTS_MAX)] | None = option(
        "required, except in an assistant's message with tool_calls"
    )


Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX, description="the conversation so far")
]


class FunctionDefinition(Lenient):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=FUNCTION_NAME_MAX, description="the function's name")
    description: str | None = option("what the function does, for the model")
    parameters: Json | None = option("JSON schema of the function's arguments")


class Tool(Lenient):
    """A tool that the model may use. All tools are functions."""

    type: Literal["function"] = option("function", "function")
    function: FunctionDefinition


class ChatBody(RequestBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = option("like max_tokens, over which it has precedence", ge=1)
    logprobs: bool | None = option("return the logprob of each chosen token")
    top_logprobs: int | None = option(
        "also return those of this many most likely tokens; needs logprobs: true", ge=0, le=TOP_LOGPROBS_MAX
    )
    chat_template_kwargs: Json | None = option("variables for the chat template")
    echo: bool | None = option(
        "return the text of the last message before the answer, if it is an assistant's"
    )
    return_prompt_text: bool | None = option("return prompt_text: the prompt as the chat template writes it")
    tools: list[Tool] | None = option("functions that the model may call", max_length=TOOLS_MAX)
    tool_choice: Annotated[object, _read_later({"enum": ["none", "auto", "required"]}, _NAMED_TOOL)] = option(
        "none: no call; auto: the model decides; required: at least one call; or the function to call; default: auto "
        "with tools, else none"
    )
    parallel_tool_calls: bool | None = option("false: at most one call in an answer")
    include_reasoning: bool | None = option("false: leave out reasoning_content")
    documents: list[Json] | None = option(
        "documents for models with a chat template that reads them", max_length=DOCUMENTS_MAX
    )
    add_generation_prompt: bool | None = option(
        "false: leave out what the chat template adds before an answer"
    )
    continue_final_message: bool | None = option(
        "true: continue the last message instead of starting an answer; needs add_generation_prompt: false"
    )
    reasoning_effort: str | None = option(
        "for models with a chat template that reads it; otherwise `Warning` names it", max_length=32
    )


class CompletionBody(RequestBody):
    """POST /v1/completions."""

    prompt: Annotated[object, WithJsonSchema({"anyOf": [_TEXT, _TOKENS, _PROMPTS, _TOKEN_PROMPTS]})] = Field(
        description=f"a text, token ids, or a list of at most {N_MAX} of either"
    )
    max_tokens: int | None = option(
        "maximum tokens of the answer; with echo, 0 returns only the prompt", ge=0
    )
    echo: bool | None = option("return the prompt before the answer")
    logprobs: int | None = option(
        "return the logprobs of each chosen token and of this many most likely tokens",
        ge=0,
        le=TOP_LOGPROBS_MAX,
    )


class PlainMessage(Struct, forbid_unknown_fields=True):
    """A message with a text and no other fields."""

    role: str
    content: str


class PlainOptions(Struct, forbid_unknown_fields=True):
    """The common option of a streamed response."""

    include_usage: bool = False


class PlainChat(Struct, forbid_unknown_fields=True):
    """A chat request with common fields only. msgspec parses it in 3.9 µs, pydantic in 18.6 µs.

    Any other body, valid or not, is parsed as `ChatBody`. A plain chat must have the same meaning in both models; a
    test compares them.
    """

    model: str
    messages: Annotated[list[PlainMessage], Meta(min_length=1, max_length=1000)]
    stream: bool = False
    stream_options: PlainOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=0, lt=2**62)] | None = None
    ignore_eos: bool = False


class TokenizerBody(Lenient):
    """Fields common to /tokenize and /detokenize. Their format is vLLM's."""

    model: str | None = option("optional if only one model is served")


class TokenizePromptBody(TokenizerBody):
    """POST /tokenize with a text."""

    prompt: str = Field(max_length=TEXT_CHARS_MAX, description="the text")
    add_special_tokens: bool = option("include the special tokens that the tokenizer adds to a prompt", True)
    return_token_strs: bool | None = option("return each token's name in the vocabulary")


class TokenizeChatBody(TokenizerBody):
    """POST /tokenize with a conversation."""

    messages: Messages
    add_generation_prompt: bool = option("include what the chat template adds before an answer", True)
    add_special_tokens: bool = option("include the special tokens that the tokenizer adds to a prompt", False)
    return_token_strs: bool | None = option("return each token's name in the vocabulary")
    chat_template_kwargs: Json | None = option("variables for the chat template")
    tools: list[Json] | None = option("for the chat template", max_length=TOOLS_MAX)


class DetokenizeBody(TokenizerBody):
    """POST /detokenize."""

    tokens: list[Token] = Field(max_length=TOKENS_MAX, description="token ids")


class PoolingBody(Lenient):
    """A body that is passed on to a server of the model. The server defines all other fields."""

    model: str | None = option("optional if only one model is served")


class BusyThresholdBody(BaseModel):
    """POST /busy_threshold: a model, and the thresholds to set."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str
    active_decode_blocks: float | None = Field(None, alias="active_decode_blocks_threshold")
    active_prefill_tokens: int | None = Field(None, alias="active_prefill_tokens_threshold")
    active_prefill_tokens_frac: float | None = Field(None, alias="active_prefill_tokens_threshold_frac")

    @property
    def thresholds(self) -> BusyThresholds:
        """The thresholds to set. Raises ValueError if a value is out of range."""
        return BusyThresholds(**self.model_dump(exclude={"model"}))


Harmless = dict[str, tuple[object, ...]]
"""For each refused field, by name: the values that are accepted because they change nothing."""


def _unless(harmless: tuple[object, ...], *names: str) -> Harmless:
    """Return a mapping of the named fields to the values with which they are accepted: null, and those in `harmless`."""
    return {name: (None, *harmless) for line in names for name in line.split()}


_REFUSED_BY_BOTH = {  # fields of other servers: vLLM, SGLang, llama-server, Hugging Face
    **_unless(
        (),
        "logprob_token_ids prompt_embeds repetition_detection",
        "lora_path custom_logit_processor guided_whitespace_pattern guided_decoding_backend regex ebnf json_schema",
        "structural_tag n_predict samplers max_new_tokens do_sample",
    ),
    **_unless(
        (False,),
        "use_beam_search watermarking no_stop_trim return_hidden_states return_routed_experts",
    ),
    **_unless((True,), "spaces_between_special_tokens"),
    **_unless(
        (0,),
        "max_repetition_pattern_size min_repetition_pattern_size repetition_min_count routed_experts_prompt_start",
        "n_probs mirostat dynatemp_range xtc_probability dry_multiplier top_a",
    ),
    **_unless((1,), "best_of typical_p length_penalty repeat_penalty tfs_z num_beams"),
    **_unless((-1,), "thinking_token_budget top_n_sigma"),
    **_unless(([],), "logits_processors"),
    **_unless(({},), "kv_transfer_params ec_transfer_params vllm_xargs session_params custom_params"),
    **_unless(("",), "grammar"),
    **_unless(("", []), "stop_regex"),
}
REFUSED_BY_CHAT = {
    **_REFUSED_BY_BOTH,
    **_unless((), "audio prediction web_search_options chat_template"),
    **_unless((True,), "separate_reasoning stream_reasoning"),
    **_unless(([],), "functions"),
    **_unless(("none", "auto"), "function_call"),
    **_unless((["text"],), "modalities"),
    **_unless(("medium",), "verbosity"),
}
REFUSED_BY_COMPLETIONS: Harmless = _REFUSED_BY_BOTH | {
    "suffix": (None, ""),
    "return_prompt_text": (None, False),
}
REFUSED_BY_TOKENIZE: Harmless = {"chat_template": (None,), "continue_final_message": (None, False)}
IGNORED: dict[str, str] = {
    "user": "identifies the end user",
    "safety_identifier": "identifies the end user",
    "metadata": "the client's own notes",
    "store": "nothing is stored",
    "service_tier": "the tier is set by X-Priority",
    "priority": "the tier is set by X-Priority",
    "prompt_cache_key": "requests are routed to their cached prefix",
    "prompt_cache_retention": "the engine decides how long a prefix stays cached",
    "cache_prompt": "cached prefixes are always used; cache_salt separates them",
    "extra_key": "cache_salt separates prefixes",
    "request_id": "the request id is set by X-Request-Id",
    "rid": "the request id is set by X-Request-Id",
    "session_id": "requests are routed to their cached prefix",
    "stream_interval": "every token is a separate event",
    "truncation_side": "truncate_prompt_tokens keeps the last tokens",
    "mm_processor_kwargs": "applies to images, which are refused",
    "media_io_kwargs": "applies to images, which are refused",
    "return_token_offsets": "vLLM returns them only for rendered prompts",
    "return_mm_kwargs": "vLLM returns them only for rendered prompts",
    "return_cached_tokens_details": "usage contains the number of cached tokens",
    "stream_options.include_obfuscation": "events are not padded",
}
