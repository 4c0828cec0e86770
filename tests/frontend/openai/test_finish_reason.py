"""An engine's own `finish_reason` reaches the client unchanged."""

from typing import Any

import pytest
from frontend_kit import frontend
from scripted_worker import Act, ScriptedWorker

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, Any] = {"prompt": [300, 301, 302]}


@pytest.mark.parametrize("reason", ["tool_calls", "content_filter", "an_engine_of_tomorrow", "stop"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", PROMPT),
        ("/v1/chat/completions", CHAT | {"logprobs": True}),  # details use other writers
        ("/v1/completions", PROMPT | {"logprobs": 1}),
    ],
)
async def test_an_engines_own_finish_reason_reaches_the_client(
    path: str, body: dict[str, Any], reason: str
) -> None:
    worker = ScriptedWorker(always=Act(finish=reason))
    async with frontend(worker) as kit:
        asked = {"model": "m", "max_tokens": 3, **body}
        status, whole, _ = await kit.post(path, **asked)
        assert (status, [choice["finish_reason"] for choice in whole["choices"]]) == (200, [reason])
        events = await kit.stream(path, **asked)
        choices = [choice for event in events for choice in event.get("choices", ())]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [reason]
        assert events[-1] == {"done": True}
