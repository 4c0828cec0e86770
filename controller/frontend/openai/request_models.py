"""The fields that request bodies may have: pydantic's models, the plain chat as msgspec reads it, and tables of other fields.

`/openapi.json` is made of the models. A field that they do not have is looked up in the tables, of which docs/api.md is made:

    REFUSED_BY_…   would change the answer and is not obeyed: refused by name, except with values that ask for what is done anyway
    IGNORED        changes no answer: passes
    neither        passes, and the response header `Warning` names it
"""

from typing import Annotated, Any

from msgspec import Meta, Struct
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from controller.deciders.thresholds import BusyThresholds

STOPS_MAX = 16
STOP_CHARS_MAX = 4_096  # of all of them: what is held back of an answer at most
N_MAX = 16
TOP_LOGPROBS_MAX = 20
MESSAGES_MAX = 10_000  # a million of them would block the event loop while they are read
PARTS_MAX = 1_000
STOP_IDS_MAX = 1_000
LOGIT_BIAS_MAX = 1_024
TOOLS_MAX = 128
SALT_CHARS_MAX = 256
TEXT_CHARS_MAX = 2**20  # of /tokenize
TOKENS_MAX = 2**18  # of /detokenize: four times as many characters, or so

Count = Annotated[int, Meta(ge=1)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TokenName = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$", description="a token id")]


def option(description: str, **bounds: Any) -> Any:
    """Return a field that may be left out."""
    return Field(default=None, description=description, **bounds)


def _no_more(most: int, what: str) -> BeforeValidator:
    """Refuse a mapping of too many entries before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most} {what}")
        return value

    return BeforeValidator(check)


def _read_later(*schemas: dict[str, Any]) -> WithJsonSchema:
    """Describe a field that the parser validates: all of it must not be read before it is known to be short."""
    return WithJsonSchema({"anyOf": [*schemas, {"type": "null"}]})


_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TOKENS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STOP = {**_TEXT, "maxLength": STOP_CHARS_MAX}
_STOPS = {"type": "array", "items": _STOP, "maxItems": STOPS_MAX}
_PROMPTS = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": N_MAX}
_TOKEN_PROMPTS = {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": N_MAX}


class StreamOptions(BaseModel):
    """What a stream carries besides tokens."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = Field(default=False, description="a last event with the usage")
    continuous_usage_stats: bool = Field(
        default=False, description="the usage so far with every event; needs include_usage"
    )


class RequestBody(BaseModel):
    """What both kinds of request share."""

    model_config = ConfigDict(extra="allow", strict=False, protected_namespaces=())

    model: str = Field(description="a name that /v1/models lists")
    stream: bool = Field(default=False, description="an event for each token, instead of the whole answer")
    stream_options: StreamOptions | None = option(
        "include_usage, continuous_usage_stats; only with stream: true"
    )
    max_tokens: int | None = option("tokens of the answer at most", ge=1)
    min_tokens: int | None = option("no end of the answer before so many", ge=0)
    temperature: float | None = option(
        "0: always the likeliest token; usually 1", ge=0, le=2, allow_inf_nan=False
    )
    top_p: float | None = option("draw from the likeliest tokens that have this share together", gt=0, le=1)
    top_k: int | None = option("draw from so many likeliest tokens; 0, -1: all", ge=-1, lt=2**31)
    min_p: float | None = option(
        "draw from tokens with this share of the likeliest one's probability", ge=0, le=1
    )
    seed: int | None = option("the same draws every time", ge=-(2**63), lt=2**63)
    stop: Annotated[Any, _read_later(_STOP, _STOPS)] = option(
        f"a text that ends the answer, or {STOPS_MAX} of them at most, with {STOP_CHARS_MAX:,} characters together"
    )
    stop_token_ids: list[Token] | None = option("tokens that end the answer", max_length=STOP_IDS_MAX)
    n: int | None = option("answers to each prompt", ge=1, le=N_MAX)
    ignore_eos: bool = Field(default=False, description="go on behind the end of the answer")
    cache_salt: str | None = option(
        "share prefixes only with requests that have the same", min_length=1, max_length=SALT_CHARS_MAX
    )
    presence_penalty: float | None = option(
        "taken off the logits of tokens that the answer has said", ge=-2, le=2
    )
    frequency_penalty: float | None = option("likewise, once for each time that it has", ge=-2, le=2)
    repetition_penalty: float | None = option(
        "what divides the logits of tokens of the answer and the prompt; 1: nothing", gt=0, le=10
    )
    logit_bias: Annotated[dict[TokenName, Bias] | None, _no_more(LOGIT_BIAS_MAX, "tokens")] = option(
        "by token id: what is added to its logit", max_length=LOGIT_BIAS_MAX
    )
    return_token_ids: bool | None = option("give token_ids beside the text, and prompt_token_ids")
    return_tokens_as_token_ids: bool | None = option('name the tokens of logprobs "token_id:N"')
    response_format: dict[str, Any] | None = option(
        "the form of the answer: type text, json_object or json_schema"
    )
    structured_outputs: dict[str, Any] | None = option(
        "the form of the answer, as vLLM has it: json, regex, choice, grammar …"
    )
    guided_json: dict[str, Any] | str | None = option("structured_outputs.json")
    guided_regex: str | None = option("structured_outputs.regex")
    guided_choice: list[str] | None = option("structured_outputs.choice")
    guided_grammar: str | None = option("structured_outputs.grammar")


class Part(BaseModel):
    """One part of a message's content."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One message of a conversation. What it has besides is the chat template's to read."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[Part], Field(max_length=PARTS_MAX)] | None = option(
        "only an assistant's message with tool_calls may have none"
    )


class ChatBody(RequestBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(
        min_length=1, max_length=MESSAGES_MAX, description="the conversation so far"
    )
    max_completion_tokens: int | None = option("max_tokens, before which it goes", ge=1)
    logprobs: bool | None = option("of each token that was chosen")
    top_logprobs: int | None = option(
        "and of so many best ones; needs logprobs: true", ge=0, le=TOP_LOGPROBS_MAX
    )
    chat_template_kwargs: dict[str, Any] | None = option("names that the chat template may read")
    tools: list[dict[str, Any]] | None = option('only with tool_choice: "none"', max_length=TOOLS_MAX)
    tool_choice: Annotated[Any, _read_later({"enum": ["none", "auto"]})] = option(
        '"none"; "auto" where there are no tools'
    )
    reasoning_effort: str | None = option("for models whose chat template reads it", max_length=32)


class CompletionBody(RequestBody):
    """POST /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _TOKENS, _PROMPTS, _TOKEN_PROMPTS]})] = Field(
        description=f"a text, token ids, or a list of {N_MAX} of either at most"
    )
    max_tokens: int | None = option("tokens of the answer at most; with echo 0: the prompt alone", ge=0)
    echo: bool | None = option("say the prompt before the answer")
    logprobs: int | None = option(
        "of each token that was chosen, and of so many best ones", ge=0, le=TOP_LOGPROBS_MAX
    )


class PlainMessage(Struct, forbid_unknown_fields=True):
    """One message: a text."""

    role: str
    content: str


class PlainOptions(Struct, forbid_unknown_fields=True):
    """What a stream carries besides tokens."""

    include_usage: bool = False


class PlainChat(Struct, forbid_unknown_fields=True):
    """A chat without anything unusual, as nearly every chat is: msgspec parses it in 3.9 µs, where pydantic takes 18.6.

    Any other body, valid or not, is for `ChatBody`. What is plain must mean the same there; a test compares both.
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


class TokenizerBody(BaseModel):
    """What the bodies of /tokenize and /detokenize share. Their shapes are vLLM's."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = option("may be left out where only one is served")


class TokenizePromptBody(TokenizerBody):
    """POST /tokenize, of a text."""

    prompt: str = Field(max_length=TEXT_CHARS_MAX, description="the text")
    add_special_tokens: bool = Field(
        default=True, description="with those that the tokenizer puts around a prompt"
    )
    return_token_strs: bool | None = option("give what the vocabulary calls each token")


class TokenizeChatBody(TokenizerBody):
    """POST /tokenize, of a conversation."""

    messages: list[ChatMessage] = Field(
        min_length=1, max_length=MESSAGES_MAX, description="the conversation so far"
    )
    add_generation_prompt: bool = Field(
        default=True, description="with what the chat template puts before an answer"
    )
    add_special_tokens: bool = Field(
        default=False, description="with those that the tokenizer puts around a prompt"
    )
    return_token_strs: bool | None = option("give what the vocabulary calls each token")
    chat_template_kwargs: dict[str, Any] | None = option("names that the chat template may read")
    tools: list[dict[str, Any]] | None = option("for the chat template", max_length=TOOLS_MAX)


class DetokenizeBody(TokenizerBody):
    """POST /detokenize."""

    tokens: list[Token] = Field(max_length=TOKENS_MAX, description="token ids")


class BusyThresholdBody(BaseModel):
    """What is asked: of which model, and what is to be set."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None

    @property
    def given(self) -> BusyThresholds:
        """The thresholds to set. Raise ValueError if one is out of range."""
        return BusyThresholds(
            self.active_decode_blocks_threshold,
            self.active_prefill_tokens_threshold,
            self.active_prefill_tokens_threshold_frac,
        )


def _unless(harmless: tuple[Any, ...], *names: str) -> dict[str, tuple[Any, ...]]:
    """Return fields that are refused unless they have one of these values, or null."""
    return {name: (None, *harmless) for line in names for name in line.split()}


_REFUSED_BY_BOTH = {  # other servers' fields: vLLM's, SGLang's, llama-server's, Hugging Face's
    **_unless(
        (),
        "allowed_token_ids truncate_prompt_tokens prompt_logprobs logprob_token_ids prompt_embeds repetition_detection",
        "lora_path custom_logit_processor guided_whitespace_pattern guided_decoding_backend regex ebnf json_schema",
        "structural_tag n_predict samplers max_new_tokens do_sample",
    ),
    **_unless(
        (False,),
        "use_beam_search watermarking include_stop_str_in_output no_stop_trim return_hidden_states",
        "return_routed_experts return_prompt_text",
    ),
    **_unless((True,), "skip_special_tokens spaces_between_special_tokens"),
    **_unless(
        (0,),
        "max_repetition_pattern_size min_repetition_pattern_size repetition_min_count routed_experts_prompt_start",
        "n_probs mirostat dynatemp_range xtc_probability dry_multiplier top_a",
    ),
    **_unless((1,), "best_of typical_p length_penalty repeat_penalty tfs_z num_beams"),
    **_unless((-1,), "thinking_token_budget top_n_sigma"),
    **_unless(([],), "bad_words logits_processors"),
    **_unless(({},), "kv_transfer_params ec_transfer_params vllm_xargs session_params custom_params"),
    **_unless(("",), "grammar"),
    **_unless(("", []), "stop_regex"),
}
REFUSED_BY_CHAT = {
    **_REFUSED_BY_BOTH,
    **_unless((), "audio prediction web_search_options chat_template"),
    **_unless((False,), "echo continue_final_message add_special_tokens separate_reasoning"),
    **_unless((True,), "add_generation_prompt include_reasoning stream_reasoning"),
    **_unless(([],), "functions documents"),
    **_unless(("none", "auto"), "function_call"),
    **_unless((["text"],), "modalities"),
    **_unless(("medium",), "verbosity"),
}
REFUSED_BY_COMPLETIONS = _REFUSED_BY_BOTH | {"suffix": (None, ""), "add_special_tokens": (None, True)}
REFUSED_BY_TOKENIZE = {"chat_template": (None,), "continue_final_message": (None, False)}
IGNORED: dict[str, str] = {
    "user": "whose request it is",
    "safety_identifier": "whose request it is",
    "metadata": "the client's own notes",
    "store": "nothing is kept",
    "service_tier": "X-Priority is the tier",
    "priority": "X-Priority is the tier",
    "prompt_cache_key": "requests go where their prefix is",
    "prompt_cache_retention": "how long a prefix is kept is the engine's affair",
    "cache_prompt": "prefixes are found wherever they are; cache_salt keeps them apart",
    "extra_key": "cache_salt keeps prefixes apart",
    "request_id": "X-Request-Id names a request",
    "rid": "X-Request-Id names a request",
    "session_id": "requests go where their prefix is",
    "parallel_tool_calls": "there are no tool calls yet",
    "stream_interval": "every token is an event of its own",
    "truncation_side": "nothing is cut off",
    "mm_processor_kwargs": "of images, which are refused",
    "media_io_kwargs": "of images, which are refused",
    "return_token_offsets": "vLLM gives them for rendered prompts only",
    "return_mm_kwargs": "vLLM gives them for rendered prompts only",
    "return_cached_tokens_details": "usage has the number of cached tokens",
    "stream_options.include_obfuscation": "events are not padded",
}
