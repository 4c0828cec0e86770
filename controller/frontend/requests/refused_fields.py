"""Which fields of a body are refused: those that would change the answer, and that nobody here obeys.

Each stands with the values that are harmless, because they ask for what is done anyway.
"""

from collections.abc import Mapping
from typing import Any

from controller.frontend.errors import unsupported

_REFUSED_BY_BOTH: dict[str, tuple[Any, ...]] = {
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    # vLLM's and SGLang's own
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "stop_regex": (None, "", []),
    "include_stop_str_in_output": (None, False),
    "no_stop_trim": (None, False),
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None,),
    "prompt_embeds": (None,),
    "lora_path": (None,),
    "custom_logit_processor": (None,),
    "logits_processors": (None, []),
    "regex": (None,),
    "ebnf": (None,),
    "json_schema": (None,),
    "structural_tag": (None,),
}
REFUSED_BY_CHAT: dict[str, tuple[Any, ...]] = _REFUSED_BY_BOTH | {
    "tools": (None, []),
    "functions": (None, []),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "echo": (None, False),
    "chat_template": (None,),
    "documents": (None, []),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "add_special_tokens": (None, False),
}
REFUSED_BY_COMPLETIONS: dict[str, tuple[Any, ...]] = _REFUSED_BY_BOTH | {
    "echo": (None, False),
    "suffix": (None, ""),
    "add_special_tokens": (None, True),
}


def refuse(extra: Mapping[str, Any] | None, refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ApiError (400) for the first of the `refused` fields that `extra` sets to a value that is not harmless."""
    if not extra:
        return
    for name, harmless in refused.items():
        if name in extra and extra[name] not in harmless:
            raise unsupported(name)
