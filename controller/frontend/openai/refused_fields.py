"""What becomes of the fields of a body that `bodies` does not have?

    would change the answer, and nobody here obeys it   refused by name, but for the values that ask for what is done anyway
    changes no answer                                   passes
    nobody knows it                                     passes, and the answer's header `Warning` names it

docs/api.md has both lists, made of these tables.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from controller.frontend.errors import unsupported

_REFUSED_BY_BOTH: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    # vLLM's and SGLang's own
    "typical_p": (None, 1),
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
    "watermarking": (None, False),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "stop_regex": (None, "", []),
    "include_stop_str_in_output": (None, False),
    "no_stop_trim": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None,),
    "prompt_embeds": (None,),
    "repetition_detection": (None,),
    "max_repetition_pattern_size": (None, 0),
    "min_repetition_pattern_size": (None, 0),
    "repetition_min_count": (None, 0),
    "thinking_token_budget": (None, -1),
    "kv_transfer_params": (None, {}),
    "ec_transfer_params": (None, {}),
    "vllm_xargs": (None, {}),
    "session_params": (None, {}),
    "custom_params": (None, {}),
    "return_hidden_states": (None, False),
    "return_routed_experts": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "return_prompt_text": (None, False),
    "lora_path": (None,),
    "custom_logit_processor": (None,),
    "logits_processors": (None, []),
    "guided_whitespace_pattern": (None,),
    "guided_decoding_backend": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "json_schema": (None,),
    "structural_tag": (None,),
    # llama-server's, and those of Hugging Face's servers
    "grammar": (None, ""),
    "n_predict": (None,),
    "n_probs": (None, 0),
    "repeat_penalty": (None, 1),
    "mirostat": (None, 0),
    "dynatemp_range": (None, 0),
    "xtc_probability": (None, 0),
    "dry_multiplier": (None, 0),
    "top_n_sigma": (None, -1),
    "top_a": (None, 0),
    "tfs_z": (None, 1),
    "samplers": (None,),
    "max_new_tokens": (None,),
    "do_sample": (None,),
    "num_beams": (None, 1),
}
REFUSED_BY_CHAT: dict[str, tuple[Any, ...]] = _REFUSED_BY_BOTH | {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "verbosity": (None, "medium"),
    "echo": (None, False),
    "chat_template": (None,),
    "documents": (None, []),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "add_special_tokens": (None, False),
    "include_reasoning": (None, True),
    "separate_reasoning": (None, False),
    "stream_reasoning": (None, True),
}
REFUSED_BY_COMPLETIONS: dict[str, tuple[Any, ...]] = _REFUSED_BY_BOTH | {
    "suffix": (None, ""),
    "add_special_tokens": (None, True),
}
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


def refuse(extra: Mapping[str, Any] | None, refused: Mapping[str, tuple[Any, ...]]) -> tuple[str, ...]:
    """Return which of the fields in `extra` nobody knows. Raise ApiError (400) for the first of the `refused` ones that has a
    value which is not harmless."""
    unknown = []
    for name, value in (extra or {}).items():
        if name not in refused:
            unknown.append(name)
        elif value not in refused[name]:
            raise unsupported(name)
    return tuple(name for name in unknown if name not in IGNORED)


def unknown_options(extra: Mapping[str, Any] | None) -> Iterable[str]:
    """Return which of these fields of `stream_options` nobody knows, by their full names."""
    names = (f"stream_options.{name}" for name in extra or ())
    return (name for name in names if name not in IGNORED)
