"""Probes of streamed completions."""

from probe import COMPLETIONS, GREEDY, PROMPT, Server, finishes, text_of, usage


def a_streamed_completion(server: Server) -> object:
    events = server.stream(max_tokens=12)
    assert all(e["object"] == "text_completion" and e["model"] == "tiny" for e in events)
    assert len({e["id"] for e in events}) == 1 and finishes(events) == {0: "length"}
    assert text_of(events) == server.completed(max_tokens=12)["text"]
    return text_of(events)


def a_stream_ends_with_its_last_text(server: Server) -> object:
    last = server.stream()[-1]["choices"][0]
    assert last["finish_reason"] == "length" and last["text"]
    return None


def streams_of_several_prompts(server: Server) -> object:
    events = server.stream([PROMPT, "import os"])
    assert finishes(events) == {0: "length", 1: "length"}
    return text_of(events, 0), text_of(events, 1)


def streams_of_several_answers(server: Server) -> object:
    events = server.stream(n=3, temperature=1, seed=3)
    assert set(finishes(events)) == {0, 1, 2}
    assert len({text_of(events, index) for index in range(3)}) == 3
    return None


def the_usage_of_a_stream_comes_last(server: Server) -> object:
    events = server.stream(stream_options={"include_usage": True})
    assert events[-1]["choices"] == [] and all(e.get("usage") is None for e in events[:-1])
    return usage(events[-1])


def no_usage_of_a_stream(server: Server) -> object:
    for options in (None, {}, {"include_usage": False}):
        assert all(e.get("usage") is None for e in server.stream(stream_options=options))
    return None


def the_usage_so_far(server: Server) -> object:
    events = server.stream(stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert usage(events[0])[1] >= 1 and usage(events[-1])[1] == 6
    return usage(events[-1])


def the_usage_so_far_alone_is_none(server: Server) -> object:
    options = {"include_usage": False, "continuous_usage_stats": True}
    return [event.get("usage") for event in server.stream(stream_options=options) if event.get("usage")]


def a_streams_echo_of_its_prompt_alone(server: Server) -> object:
    return text_of(server.stream(echo=True, max_tokens=0))


def an_event_stream_ends_with_done(server: Server) -> object:
    reply = server.post(COMPLETIONS, prompt=PROMPT, stream=True, **GREEDY)
    assert reply.text.endswith("data: [DONE]\n\n")
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return None


def characters_of_several_tokens_are_whole(server: Server) -> object:
    fields = {"structured_outputs": {"choice": ["日本語の🏔️"]}, "max_tokens": 40}
    text = text_of(server.stream(**fields))
    assert text == "日本語の🏔️"
    return text
