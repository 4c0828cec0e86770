"""Probes of /v1/chat/completions: messages, templates, lengths, stops, logprobs."""

from probe import SAID, Json, Server, content_of, finishes, usage

DIALOGUE = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
]
UNFINISHED = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one, two, "}]


def a_message_gets_a_message(server: Server) -> object:
    whole = server.chat()
    (choice,) = whole["choices"]
    assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-")
    assert isinstance(whole["created"], int) and whole["model"] == "tiny"
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert choice["message"]["role"] == "assistant" and not choice["message"].get("tool_calls")
    return choice["message"]["content"], usage(whole)


def a_dialogue_gets_the_next_message(server: Server) -> object:
    whole = server.chat(DIALOGUE)
    return whole["choices"][0]["message"]["content"], usage(whole)


def an_answer_is_part_of_the_next_request(server: Server) -> object:
    first = server.said()
    return server.said(
        [*SAID, {"role": "assistant", "content": first}, {"role": "user", "content": "Go on."}]
    )


def content_in_parts(server: Server) -> object:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the answer?"}]
    return server.said([{"role": "user", "content": parts}])


def one_part_is_its_text(server: Server) -> object:
    text = server.said([{"role": "user", "content": [{"type": "text", "text": "What is the answer?"}]}])
    assert text == server.said()
    return text


def a_developers_message(server: Server) -> object:
    return server.said([{"role": "developer", "content": "Be brief."}, *SAID])


def a_message_with_a_name(server: Server) -> object:
    return server.said([{"role": "user", "name": "Ann", "content": "What is the answer?"}])


def an_empty_message(server: Server) -> object:
    return server.said([{"role": "user", "content": ""}])


def max_tokens_by_the_newer_name(server: Server) -> object:
    whole = server.chat(max_completion_tokens=4, max_tokens=None)
    assert usage(whole)[1] == 4
    return whole["choices"][0]["message"]["content"]


def the_newer_name_of_max_tokens_precedes(server: Server) -> object:
    return usage(server.chat(max_completion_tokens=3, max_tokens=9))


def two_answers_to_a_chat(server: Server) -> object:
    whole = server.chat(n=2, temperature=1, seed=7)
    first, second = (one["message"]["content"] for one in whole["choices"])
    assert first != second and [one["index"] for one in whole["choices"]] == [0, 1]
    return usage(whole)


def the_chosen_token_alone_has_a_logprob_in_a_chat(server: Server) -> object:
    content = server.chat(logprobs=True, top_logprobs=0)["choices"][0]["logprobs"]["content"]
    assert all(one["top_logprobs"] == [] and one["logprob"] <= 0 for one in content)
    return [(one["token"], one["logprob"], one["bytes"]) for one in content]


def logprobs_of_a_chat_without_alternatives(server: Server) -> object:
    content = server.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    return [(one["token"], one["logprob"], one["top_logprobs"]) for one in content]


def the_best_five_tokens_of_a_chat(server: Server) -> object:
    (choice,) = server.chat(logprobs=True, top_logprobs=5)["choices"]
    content = choice["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in content] == [5] * 6
    joined = b"".join(bytes(one["bytes"]) for one in content)
    assert joined.decode(errors="replace").startswith(choice["message"]["content"][:4])
    return [[(top["token"], top["logprob"]) for top in one["top_logprobs"]] for one in content]


def no_logprobs_unless_requested(server: Server) -> object:
    assert server.chat(logprobs=False)["choices"][0]["logprobs"] is None
    return None


def logprobs_of_a_chat_by_their_ids(server: Server) -> object:
    choice = server.chat(logprobs=True, return_tokens_as_token_ids=True)["choices"][0]
    tokens = [one["token"] for one in choice["logprobs"]["content"]]
    assert all(one.startswith("token_id:") for one in tokens)
    return tokens


def logprobs_of_a_chats_prompt(server: Server) -> object:
    whole = server.chat(prompt_logprobs=1)
    found = whole["prompt_logprobs"]
    assert len(found) == usage(whole)[0] and found[0] is None
    return [sorted(one) for one in found[1:]]


def more_logprobs_of_a_chats_prompt(server: Server) -> object:
    found = server.chat(prompt_logprobs=2)["prompt_logprobs"]
    return [sorted(one) for one in found[1:]]


def a_stop_string_ends_a_chat(server: Server) -> object:
    text = server.said(max_tokens=24)
    stop = text[8:12]
    (choice,) = server.chat(max_tokens=24, stop=[stop])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["message"]["content"] == text[: text.index(stop)]
    return choice["message"]["content"]


def a_stop_string_stays_in_a_chat(server: Server) -> object:
    stop = server.said(max_tokens=24)[8:12]
    text = server.said(max_tokens=24, stop=stop, include_stop_str_in_output=True)
    assert text.endswith(stop)
    return text


def a_stop_token_ends_a_chat(server: Server) -> object:
    ids = server.chat(max_tokens=24, return_token_ids=True)["choices"][0]["token_ids"]
    (choice,) = server.chat(max_tokens=24, stop_token_ids=[ids[9]])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[9])
    return choice["message"]["content"]


def the_end_of_sequence_ends_a_chat(server: Server) -> object:
    (choice,) = server.chat(logit_bias={"2": 100})["choices"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None
    return choice["message"]["content"] or ""


def the_end_of_sequence_is_ignored_in_a_chat(server: Server) -> object:
    return usage(server.chat(logit_bias={"2": 100}, ignore_eos=True))


def at_least_some_tokens_of_a_chat(server: Server) -> object:
    return usage(server.chat(logit_bias={"2": 100}, min_tokens=4, max_tokens=5))


def a_seed_makes_a_chat_repeatable(server: Server) -> object:
    first, second = (server.said(temperature=1, seed=11) for _ in range(2))
    assert first == second
    return first


def all_sampling_fields_of_a_chat(server: Server) -> object:
    return server.said(
        temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=5, presence_penalty=0.5,
        frequency_penalty=0.5, repetition_penalty=1.1, max_tokens=12,
    )  # fmt: skip


def a_bias_forces_a_token_of_a_chat(server: Server) -> object:
    whole = server.chat(logit_bias={"700": 100}, return_token_ids=True)
    assert whole["choices"][0]["token_ids"] == [700] * 6
    return whole["choices"][0]["message"]["content"]


def only_allowed_tokens_in_a_chat(server: Server) -> object:
    return server.said(allowed_token_ids=[300, 301])


def no_bad_words_in_a_chat(server: Server) -> object:
    first = server.chat(logprobs=True)["choices"][0]["logprobs"]["content"][0]["token"]
    text = server.said(bad_words=[first])
    assert not text.startswith(first)
    return text


def the_ids_of_a_chat(server: Server) -> object:
    whole = server.chat(return_token_ids=True)
    assert (len(whole["prompt_token_ids"]), len(whole["choices"][0]["token_ids"])) == usage(whole)
    return whole["prompt_token_ids"], whole["choices"][0]["token_ids"]


def no_ids_of_a_chat_unless_requested(server: Server) -> object:
    whole = server.chat()
    assert whole["prompt_token_ids"] is None and whole["choices"][0]["token_ids"] is None
    assert whole["prompt_logprobs"] is None
    return None


def special_tokens_are_shown_in_a_chat(server: Server) -> object:
    return server.said(logit_bias={"1": 100}, max_tokens=2, skip_special_tokens=False)


# --- the chat template


def an_answer_continues_the_last_message(server: Server) -> object:
    whole = server.chat(UNFINISHED, continue_final_message=True, add_generation_prompt=False)
    assert "one, two" not in whole["choices"][0]["message"]["content"]
    return whole["choices"][0]["message"]["content"], usage(whole)


def the_last_message_is_echoed(server: Server) -> object:
    text = server.said(UNFINISHED, continue_final_message=True, add_generation_prompt=False, echo=True)
    assert text.startswith("one, two, ") and len(text) > len("one, two, ")
    return text


def no_generation_prompt(server: Server) -> object:
    fewer = usage(server.chat(add_generation_prompt=False))[0]
    assert fewer < usage(server.chat())[0]
    return fewer


def special_tokens_before_a_chat(server: Server) -> object:
    return usage(server.chat(add_special_tokens=True))


def another_chat_template(server: Server) -> object:
    whole = server.chat(
        chat_template="{% for message in messages %}[{{ message['content'] }}]{% endfor %}",
        return_token_ids=True,
    )
    return whole["prompt_token_ids"]


def variables_of_the_chat_template(server: Server) -> object:
    more = server.chat(chat_template_kwargs={"enable_thinking": False}, return_token_ids=True)
    assert len(more["prompt_token_ids"]) > usage(server.chat())[0]
    return more["prompt_token_ids"]


def documents_for_the_chat_template(server: Server) -> object:
    documents = [{"title": "Numbers", "text": "The answer is 42."}]
    whole = server.chat(documents=documents, return_token_ids=True)
    assert len(whole["prompt_token_ids"]) > usage(server.chat())[0]
    return whole["prompt_token_ids"]


def reasoning_effort_is_accepted(server: Server) -> object:
    return server.said(reasoning_effort="low")


def the_end_of_a_chat_is_kept(server: Server) -> object:
    whole = server.chat(truncate_prompt_tokens=4, return_token_ids=True)
    assert len(whole["prompt_token_ids"]) == 4
    return whole["prompt_token_ids"]


# --- streams


def a_stream_has_the_text_in_pieces(server: Server) -> object:
    events = server.chats(max_tokens=12)
    assert all(e["object"] == "chat.completion.chunk" and e["model"] == "tiny" for e in events)
    assert len({e["id"] for e in events}) == 1 and events[0]["id"].startswith("chatcmpl-")
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert finishes(events) == {0: "length"} and len(events) > 4
    assert content_of(events) == server.said(max_tokens=12)
    return content_of(events)


def the_role_comes_once(server: Server) -> object:
    events = server.chats()
    roles = [c["delta"]["role"] for e in events for c in e["choices"] if c["delta"].get("role")]
    assert roles == ["assistant"]
    return None


def the_end_of_a_stream_has_the_last_text(server: Server) -> object:
    last = server.chats()[-1]["choices"][0]
    assert last["finish_reason"] == "length" and last["delta"]["content"]
    return None


def a_stream_of_two_answers(server: Server) -> object:
    events = server.chats(n=2, temperature=1, seed=7)
    assert finishes(events) == {0: "length", 1: "length"}
    assert content_of(events, 0) and content_of(events, 1)
    return None


def a_stream_has_its_usage_last(server: Server) -> object:
    events = server.chats(stream_options={"include_usage": True})
    assert events[-1]["choices"] == [] and all(e.get("usage") is None for e in events[:-1])
    return usage(events[-1])


def a_stream_has_no_usage(server: Server) -> object:
    events = server.chats(stream_options={"include_usage": False})
    assert all(e["choices"] and e.get("usage") is None for e in events)
    return None


def every_event_has_the_usage_so_far(server: Server) -> object:
    events = server.chats(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [usage(event)[1] for event in events]
    assert counts == sorted(counts) and counts[-1] == 6
    return usage(events[-1])


def usage_so_far_without_usage_is_none(server: Server) -> object:
    events = server.chats(stream_options={"include_usage": False, "continuous_usage_stats": True})
    return [event.get("usage") for event in events if event.get("usage")]


def empty_stream_options(server: Server) -> object:
    events = server.chats(stream_options={})
    assert all(e.get("usage") is None for e in events)
    return content_of(events)


def a_stream_has_logprobs(server: Server) -> object:
    events = server.chats(logprobs=True, top_logprobs=2)
    shown: list[Json] = []
    for event in events:
        for choice in event["choices"]:
            shown += (choice.get("logprobs") or {}).get("content") or ()
    assert len(shown) == 6 and all(len(one["top_logprobs"]) == 2 for one in shown)
    return [(one["token"], one["logprob"]) for one in shown]


def the_ids_of_a_streamed_chat(server: Server) -> object:
    events = server.chats(return_token_ids=True)
    given = [e["prompt_token_ids"] for e in events if e.get("prompt_token_ids")]
    assert len(given) == 1 and events[0].get("prompt_token_ids")
    ids = [token for e in events for c in e["choices"] for token in c.get("token_ids") or ()]
    assert len(ids) == 6
    return given, ids


def a_stop_string_ends_a_streamed_chat(server: Server) -> object:
    stop = server.said(max_tokens=24)[8:12]
    events = server.chats(max_tokens=24, stop=stop)
    assert finishes(events) == {0: "stop"} and stop not in content_of(events)
    return content_of(events)


def a_streamed_answer_continues_the_last_message(server: Server) -> object:
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    text = content_of(server.chats(UNFINISHED, **fields))
    assert text == server.said(UNFINISHED, **fields)
    return text


def the_last_message_is_echoed_in_a_stream(server: Server) -> object:
    fields = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    text = content_of(server.chats(UNFINISHED, **fields))
    assert text.startswith("one, two, ")
    return text


def a_stream_ends_at_the_end_of_sequence(server: Server) -> object:
    events = server.chats(logit_bias={"2": 100})
    return finishes(events), content_of(events)


# --- fields without effect


def fields_of_openai_are_accepted(server: Server) -> object:
    return server.said(
        user="someone", metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="x",
        prompt_cache_key="k", parallel_tool_calls=True,
    )  # fmt: skip


def fields_of_vllm_are_accepted(server: Server) -> object:
    return server.said(request_id="probe", priority=0, cache_salt="salt", include_reasoning=True)


def a_response_format_of_text(server: Server) -> object:
    return server.said(response_format={"type": "text"})


def modalities_of_text(server: Server) -> object:
    return server.said(modalities=["text"])


def null_fields_of_a_chat(server: Server) -> object:
    names = "n stop seed logprobs top_logprobs user tools tool_choice response_format stream_options metadata"
    return server.said(**dict.fromkeys(names.split()))


def beams_of_a_chat(server: Server) -> object:
    whole = server.chat(use_beam_search=True, n=2, max_tokens=3)
    return [one["message"]["content"] for one in whole["choices"]]


def a_chat_without_its_models_name(server: Server) -> object:
    return server.said(model=None)
