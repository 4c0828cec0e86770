"""Probes of a server that separates reasoning from the answer."""

from probe import Json, Server, content_of, finishes, usage

ANSWER = "<think>\nOne and one.\n</think>\n\nTwo."
THOUGHT: Json = {"structured_outputs": {"choice": [ANSWER]}, "max_tokens": 60}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def _reasoning(message: Json) -> str:
    return (message.get("reasoning") or "").strip()


def reasoning_is_apart_from_the_answer(server: Server) -> object:
    message = server.message(**THOUGHT)
    assert "think>" not in message["content"]
    return _reasoning(message), message["content"].strip()


def a_stream_of_reasoning(server: Server) -> object:
    events = server.chats(**THOUGHT)
    said = "".join(c["delta"].get("reasoning") or "" for e in events for c in e["choices"])
    assert finishes(events) == {0: "stop"}
    return said.strip(), content_of(events).strip()


def reasoning_may_be_left_out(server: Server) -> object:
    message = server.message(**THOUGHT, include_reasoning=False)
    assert not message.get("reasoning")
    return message["content"].strip()


def reasoning_counts_as_tokens(server: Server) -> object:
    return usage(server.chat(**THOUGHT))


def reasoning_before_a_call(server: Server) -> object:
    answer: Json = {
        "structured_outputs": {"choice": ["<think>\nAdd.\n</think>\n\n" + CALL]},
        "max_tokens": 80,
    }
    (choice,) = server.chat(tools=[TOOL], **answer)["choices"]
    (call,) = choice["message"]["tool_calls"]
    return _reasoning(choice["message"]), call["function"]["name"], choice["finish_reason"]


def no_reasoning_is_wanted(server: Server) -> object:
    fields: Json = {
        "structured_outputs": {"choice": ["Two."]},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    message = server.message(**fields)
    assert not message.get("reasoning")
    return message["content"]


def reasoning_of_an_earlier_message(server: Server) -> object:
    said = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "reasoning": "One and one.", "content": "2"},
        {"role": "user", "content": "Sure?"},
    ]
    return usage(server.chat(said))[0]


def reasoning_with_logprobs(server: Server) -> object:
    (choice,) = server.chat(**THOUGHT, logprobs=True)["choices"]
    assert choice["logprobs"]["content"]
    return _reasoning(choice["message"])


def a_message_of_anthropics_api_with_thinking(server: Server) -> object:
    whole = server.post(
        "/v1/messages", messages=[{"role": "user", "content": "1 + 1?"}], max_tokens=8, temperature=0
    )
    return [block["type"] for block in whole.good["content"]]
