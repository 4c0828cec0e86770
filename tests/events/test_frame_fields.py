"""Frames keep the positions of their fields: they are arrays, and two releases exchange them."""

import inspect

import msgspec
import pytest

from events import wire

RELEASED = {  # the fields of each frame in release 0.3.0, in order
    "Beat": "phase step_age_ms prefill_tokens load draining ranks",
    "Cancel": "stream why",
    "Challenge": "nonce proof",
    "Chunk": "stream tokens finish error logprobs text cached_tokens",
    "Committed": "stream tokens bytes blocks link stopped_ms",
    "Declined": "stream reason",
    "Generate": "stream request tokens prompt_tokens sampling canary cache_salt prompt_text guided traceparent rank "
    "cache_epoch priority",
    "Hello": "frontend version nonce",
    "Load": "running waiting kv_used kv_total active_tokens canaries batch closed_s",
    "Logprob": "chosen top",
    "Proof": "proof",
    "Reserve": "stream request room_tokens",
    "Reserved": "stream grants cached_tokens",
    "Sampling": "max_tokens min_tokens temperature top_p top_k seed ignore_eos stop_token_ids presence_penalty "
    "frequency_penalty repetition_penalty logprobs min_p logit_bias prompt_logprobs unset",
    "Ship": "stream grants",
    "Stay": "stream",
    "Step": "chunks",
    "Welcome": "worker instance model version alike",
}
FRAMES: dict[str, type[msgspec.Struct]] = {
    name: one
    for name, one in vars(wire).items()
    if inspect.isclass(one) and issubclass(one, msgspec.Struct) and one.__module__ == wire.__name__
}


@pytest.mark.parametrize("name", RELEASED)
def test_new_fields_of_a_frame_come_last_and_are_optional(name: str) -> None:
    fields = msgspec.structs.fields(FRAMES[name])
    before = RELEASED[name].split()
    assert FRAMES[name].__struct_config__.array_like
    assert [field.name for field in fields][: len(before)] == before
    assert not any(field.required for field in fields[len(before) :])
