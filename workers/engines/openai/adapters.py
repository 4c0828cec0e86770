"""Selects a LoRA adapter in a request to an upstream.

vLLM      the field `model` names the adapter
SGLang    the field `lora_path` names the adapter; an unknown `model` is ignored, so the answer would be the base model's
"""

import msgspec

from events.wire import Generate
from workers.engines.openai.capabilities import Abilities


def model_fields(abilities: Abilities, request: Generate) -> dict[str, object]:
    """Return the fields of a request that select the model, or the request's adapter."""
    fields: dict[str, object] = {"model": request.adapter or abilities.model}
    if request.adapter and abilities.lora_path:
        fields["lora_path"] = request.adapter
    return fields


def client_body(abilities: Abilities, request: Generate, body: bytes) -> bytes:
    """Return the body of a client's request that is passed on, with SGLang's field for the adapter if it is needed.

    A body that is no JSON object is returned unchanged.
    """
    if not (request.adapter and abilities.lora_path):
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body
    return msgspec.json.encode(fields | {"lora_path": msgspec.Raw(msgspec.json.encode(request.adapter))})
