"""Probes of /v1/completions: prompts, lengths, stops, sampling and logprobs."""

from probe import PROMPT, Server, finishes, text_of, usage

IDS = [300, 311, 322, 333, 344]


def a_text_gets_a_text(server: Server) -> object:
    whole = server.complete()
    (choice,) = whole["choices"]
    assert whole["object"] == "text_completion" and whole["id"].startswith("cmpl-")
    assert isinstance(whole["created"], int) and whole["model"] == "tiny"
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    return choice["text"], usage(whole)


def token_ids_are_a_prompt(server: Server) -> object:
    whole = server.complete(IDS)
    assert usage(whole) == (5, 6)
    return whole["choices"][0]["text"]


def several_texts_get_an_answer_each(server: Server) -> object:
    whole = server.complete([PROMPT, "class Answer:", "import os"])
    assert [one["index"] for one in whole["choices"]] == [0, 1, 2]
    return [one["text"] for one in whole["choices"]], usage(whole)


def several_lists_of_token_ids_get_an_answer_each(server: Server) -> object:
    whole = server.complete([IDS, IDS[::-1]])
    assert usage(whole) == (10, 12)
    return [one["text"] for one in whole["choices"]]


def a_prompt_in_many_scripts(server: Server) -> object:
    whole = server.complete("naïve 日本語 🏔️ \u0000\t\r\n «x»")
    return whole["choices"][0]["text"], usage(whole)


def a_long_prompt(server: Server) -> object:
    whole = server.complete([300 + n % 1000 for n in range(3000)])
    assert usage(whole) == (3000, 6)
    return whole["choices"][0]["text"]


def sixteen_tokens_by_default(server: Server) -> object:
    whole = server.complete(max_tokens=None)
    assert usage(whole)[1] == 16
    return whole["choices"][0]["text"]


def a_single_token(server: Server) -> object:
    whole = server.complete(max_tokens=1)
    assert usage(whole)[1] == 1
    return whole["choices"][0]["text"]


def two_answers_to_a_prompt(server: Server) -> object:
    whole = server.complete(n=2, temperature=1, seed=7)
    assert [one["index"] for one in whole["choices"]] == [0, 1]
    assert whole["choices"][0]["text"] != whole["choices"][1]["text"]
    return usage(whole)


def two_answers_to_each_of_two_prompts(server: Server) -> object:
    whole = server.complete([PROMPT, "import os"], n=2, temperature=1)
    assert [one["index"] for one in whole["choices"]] == [0, 1, 2, 3]
    return usage(whole)


# --- echo


def the_prompt_is_echoed(server: Server) -> object:
    choice = server.completed(echo=True)
    assert choice["text"].startswith(PROMPT) and len(choice["text"]) > len(PROMPT)
    return choice["text"]


def the_prompt_alone_is_echoed(server: Server) -> object:
    choice = server.completed(echo=True, max_tokens=0)
    assert choice["text"] == PROMPT
    return choice["finish_reason"]


def a_prompt_of_token_ids_is_echoed_as_text(server: Server) -> object:
    return server.completed(IDS, echo=True)["text"]


def every_prompt_is_echoed(server: Server) -> object:
    choices = server.complete([PROMPT, "import os"], echo=True)["choices"]
    assert choices[0]["text"].startswith(PROMPT) and choices[1]["text"].startswith("import os")
    return [one["text"] for one in choices]


def an_echo_has_the_logprobs_of_the_prompt(server: Server) -> object:
    whole = server.complete(echo=True, logprobs=1)
    shown = whole["choices"][0]["logprobs"]
    assert len(shown["tokens"]) == sum(usage(whole))
    assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
    assert all(value <= 0 for value in shown["token_logprobs"][1:])
    return shown["tokens"], shown["token_logprobs"]


def a_prompt_is_scored_by_its_echo(server: Server) -> object:
    shown = server.completed(echo=True, logprobs=1, max_tokens=0)["logprobs"]
    assert "".join(shown["tokens"]) == PROMPT
    return shown["token_logprobs"]


def a_stream_echoes_the_prompt(server: Server) -> object:
    events = server.stream(echo=True)
    assert text_of(events) == server.completed(echo=True)["text"]
    return text_of(events)


# --- logprobs


def the_chosen_token_alone_has_a_logprob(server: Server) -> object:
    shown = server.completed(logprobs=0)["logprobs"]
    assert [len(one) for one in shown["top_logprobs"]] == [1] * 6
    return shown["tokens"], shown["token_logprobs"]


def the_best_five_tokens_have_logprobs(server: Server) -> object:
    shown = server.completed(logprobs=5)["logprobs"]
    assert all(5 <= len(one) <= 6 for one in shown["top_logprobs"])
    for token, value, top in zip(
        shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True
    ):
        assert max(top.values()) == value and top[token] == value
    return shown["top_logprobs"]


def twenty_tokens_have_logprobs(server: Server) -> object:
    shown = server.completed(logprobs=20, max_tokens=1)["logprobs"]
    assert 18 <= len(shown["top_logprobs"][0]) <= 21  # several tokens may have the same text
    return shown["token_logprobs"]


def logprobs_say_where_a_token_is(server: Server) -> object:
    choice = server.completed(logprobs=1)
    shown = choice["logprobs"]
    assert shown["text_offset"][0] == 0 and "".join(shown["tokens"]) == choice["text"]
    return shown["text_offset"]


def logprobs_of_a_sampled_token(server: Server) -> object:
    shown = server.completed(logprobs=1, temperature=1, seed=5)["logprobs"]
    for token, value, top in zip(
        shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True
    ):
        assert top[token] == value
    return shown["tokens"], shown["token_logprobs"]


def logprobs_arrive_with_their_tokens(server: Server) -> object:
    events = server.stream(logprobs=2)
    shown = [e["choices"][0]["logprobs"] for e in events if e["choices"] and e["choices"][0]["logprobs"]]
    tokens = [token for one in shown for token in one["tokens"]]
    assert tokens == server.completed(logprobs=2)["logprobs"]["tokens"]
    return tokens, [value for one in shown for value in one["token_logprobs"]]


def tokens_of_logprobs_by_their_ids(server: Server) -> object:
    shown = server.completed(logprobs=1, return_tokens_as_token_ids=True)["logprobs"]
    assert all(one.startswith("token_id:") for one in shown["tokens"])
    return shown["tokens"]


def logprobs_of_the_prompt(server: Server) -> object:
    whole = server.complete(prompt_logprobs=1)
    found = whole["choices"][0]["prompt_logprobs"]
    assert found[0] is None and len(found) == usage(whole)[0]
    assert all("decoded_token" in one and one["rank"] >= 1 for entry in found[1:] for one in entry.values())
    return [{token: one["logprob"] for token, one in entry.items()} for entry in found[1:]]


def logprobs_of_the_prompt_alone(server: Server) -> object:
    found = server.completed(IDS, prompt_logprobs=0)["prompt_logprobs"]
    assert [len(one) for one in found[1:]] == [1] * 4
    return [list(one) for one in found[1:]]


def more_logprobs_of_the_prompt(server: Server) -> object:
    found = server.completed(IDS, prompt_logprobs=3)["prompt_logprobs"]
    assert all(3 <= len(one) <= 4 for one in found[1:])
    return [sorted(one) for one in found[1:]]


def no_logprobs_of_the_prompt_unless_requested(server: Server) -> object:
    assert server.completed()["prompt_logprobs"] is None
    return None


# --- stops


def a_stop_string_ends_an_answer(server: Server) -> object:
    whole = server.completed(max_tokens=24)["text"]
    stop = whole[8:12]
    choice = server.completed(max_tokens=24, stop=stop)
    assert choice["finish_reason"] == "stop" and choice["text"] == whole[: whole.index(stop)]
    assert choice["stop_reason"] == stop
    return choice["text"]


def the_first_of_several_stop_strings(server: Server) -> object:
    whole = server.completed(max_tokens=24)["text"]
    stops = [whole[15:19], whole[6:10]]
    choice = server.completed(max_tokens=24, stop=stops)
    assert choice["text"] == whole[: min(map(whole.index, stops))]
    return choice["text"], choice["stop_reason"]


def a_stop_string_stays_in_the_answer(server: Server) -> object:
    whole = server.completed(max_tokens=24)["text"]
    stop = whole[8:12]
    choice = server.completed(max_tokens=24, stop=stop, include_stop_str_in_output=True)
    assert choice["text"].endswith(stop)
    return choice["text"]


def a_stop_string_that_does_not_occur(server: Server) -> object:
    choice = server.completed(stop="ZZZZZZ")
    assert choice["finish_reason"] == "length" and choice["stop_reason"] is None
    return choice["text"]


def a_stop_string_ends_a_stream(server: Server) -> object:
    stop = server.completed(max_tokens=24)["text"][8:12]
    events = server.stream(max_tokens=24, stop=stop)
    assert stop not in text_of(events) and finishes(events) == {0: "stop"}
    assert [c["stop_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == [stop]
    return text_of(events)


def a_stop_token_ends_an_answer(server: Server) -> object:
    ids = server.completed(max_tokens=24, return_token_ids=True)["token_ids"]
    choice = server.completed(max_tokens=24, stop_token_ids=[ids[9]])
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == ids[9]
    return choice["text"]


def the_end_of_sequence_ends_an_answer(server: Server) -> object:
    choice = server.completed(logit_bias={"2": 100})
    assert (choice["finish_reason"], choice["text"], choice["stop_reason"]) == ("stop", "", None)
    return None


def the_end_of_sequence_is_ignored(server: Server) -> object:
    choice = server.completed(logit_bias={"2": 100}, ignore_eos=True)
    assert choice["finish_reason"] == "length"
    return choice["text"]


def special_tokens_are_shown(server: Server) -> object:
    fields = {"logit_bias": {"1": 100}, "max_tokens": 3}
    assert server.completed(**fields)["text"] == ""
    shown = server.completed(**fields, skip_special_tokens=False)["text"]
    assert shown.replace(" ", "") == "<s><s><s>"
    return shown


def special_tokens_are_shown_without_spaces(server: Server) -> object:
    return server.completed(
        logit_bias={"1": 100}, max_tokens=3, skip_special_tokens=False, spaces_between_special_tokens=False
    )["text"]


def at_least_some_tokens(server: Server) -> object:
    whole = server.complete(logit_bias={"2": 100}, min_tokens=4, max_tokens=8)
    assert usage(whole)[1] >= 4
    return whole["choices"][0]["text"]


# --- sampling


def a_seed_makes_an_answer_repeatable(server: Server) -> object:
    first, second = (server.completed(temperature=1, seed=11)["text"] for _ in range(2))
    assert first == second
    return first


def another_seed_gives_another_answer(server: Server) -> object:
    texts = [server.completed(temperature=1, seed=seed)["text"] for seed in (1, 2, 3)]
    assert len(set(texts)) > 1
    return texts


def the_best_token_by_top_k(server: Server) -> object:
    text = server.completed(temperature=1, top_k=1)["text"]
    assert text == server.completed()["text"]
    return text


def all_tokens_by_top_k(server: Server) -> object:
    return server.completed(temperature=1, seed=4, top_k=-1)["text"]


def the_best_token_by_top_p(server: Server) -> object:
    text = server.completed(temperature=1, top_p=1e-6)["text"]
    assert text == server.completed()["text"]
    return text


def the_best_token_by_min_p(server: Server) -> object:
    text = server.completed(temperature=1, min_p=1.0)["text"]
    assert text == server.completed()["text"]
    return text


def a_low_temperature(server: Server) -> object:
    return server.completed(temperature=0.01, seed=3)["text"]


def a_high_temperature(server: Server) -> object:
    return server.completed(temperature=2.0, seed=3)["text"]


def a_presence_penalty(server: Server) -> object:
    return server.completed([300] * 20, presence_penalty=2.0, max_tokens=12)["text"]


def a_frequency_penalty(server: Server) -> object:
    return server.completed([300] * 20, frequency_penalty=2.0, max_tokens=12)["text"]


def negative_penalties(server: Server) -> object:
    return server.completed(presence_penalty=-2.0, frequency_penalty=-2.0, max_tokens=12)["text"]


def a_repetition_penalty(server: Server) -> object:
    return server.completed([300] * 20, repetition_penalty=1.5, max_tokens=12)["text"]


def a_bias_forces_a_token(server: Server) -> object:
    assert server.completed(logit_bias={"700": 100}, return_token_ids=True)["token_ids"] == [700] * 6
    return None


def a_bias_bans_a_token(server: Server) -> object:
    first = server.completed(return_token_ids=True)["token_ids"][0]
    ids = server.completed(logit_bias={str(first): -100}, return_token_ids=True)["token_ids"]
    assert first not in ids
    return ids


def a_bias_beyond_its_range_counts_as_its_end(server: Server) -> object:
    return server.completed(logit_bias={"700": 250.0}, return_token_ids=True)["token_ids"]


def only_allowed_tokens(server: Server) -> object:
    ids = server.completed(allowed_token_ids=[300, 301, 302], return_token_ids=True)["token_ids"]
    assert set(ids) <= {300, 301, 302}
    return ids


def no_bad_words(server: Server) -> object:
    tokens = server.completed(logprobs=0)["logprobs"]["tokens"]
    word = next(one for one in tokens if one.strip())
    ids = server.completed(bad_words=[word], return_token_ids=True)["token_ids"]
    return ids


def the_ids_of_an_answer(server: Server) -> object:
    whole = server.complete(return_token_ids=True)
    (choice,) = whole["choices"]
    assert (len(choice["prompt_token_ids"]), len(choice["token_ids"])) == usage(whole)
    return choice["prompt_token_ids"], choice["token_ids"]


def no_ids_unless_requested(server: Server) -> object:
    choice = server.completed()
    assert choice["token_ids"] is None and choice["prompt_token_ids"] is None
    return None


def the_ids_of_a_stream(server: Server) -> object:
    events = server.stream(return_token_ids=True)
    choices = [one for event in events for one in event["choices"]]
    ids = [token for one in choices for token in one.get("token_ids") or ()]
    assert ids == server.completed(return_token_ids=True)["token_ids"]
    given = [one["prompt_token_ids"] for one in choices if one.get("prompt_token_ids")]
    assert len(given) == 1 and given == [choices[0]["prompt_token_ids"]]
    return ids, given


def ids_and_logprobs_fit(server: Server) -> object:
    choice = server.completed(
        echo=True, logprobs=1, prompt_logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True
    )
    named = [int(one.removeprefix("token_id:")) for one in choice["logprobs"]["tokens"]]
    assert named == choice["prompt_token_ids"] + choice["token_ids"]
    return named


# --- the prompt


def the_end_of_a_prompt_is_kept(server: Server) -> object:
    choice = server.completed(IDS, truncate_prompt_tokens=2, return_token_ids=True)
    assert choice["prompt_token_ids"] == IDS[-2:]
    return choice["text"]


def the_start_of_a_prompt_is_kept(server: Server) -> object:
    choice = server.completed(IDS, truncate_prompt_tokens=2, truncation_side="right", return_token_ids=True)
    assert choice["prompt_token_ids"] == IDS[:2]
    return choice["text"]


def as_much_of_a_prompt_as_fits(server: Server) -> object:
    prompt = [300 + n % 1000 for n in range(5000)]
    read, made = usage(server.complete(prompt, truncate_prompt_tokens=-1))
    assert 4000 < read < 4096 and made >= 1
    return None


def a_prompt_without_special_tokens(server: Server) -> object:
    return server.completed(add_special_tokens=False, return_token_ids=True)["prompt_token_ids"]


def a_salt_changes_no_answer(server: Server) -> object:
    text = server.completed(cache_salt="salt")["text"]
    assert text == server.completed()["text"]
    return text


def beams_of_a_completion(server: Server) -> object:
    whole = server.complete(use_beam_search=True, n=2, max_tokens=3)
    assert len(whole["choices"]) == 2
    return [one["text"] for one in whole["choices"]]


def logprobs_of_named_tokens(server: Server) -> object:
    return server.completed(logprobs=1, logprob_token_ids=[300, 301])["logprobs"]["token_logprobs"]


def the_end_of_repetitions(server: Server) -> object:
    choice = server.completed(
        logit_bias={"700": 100},
        max_tokens=40,
        return_token_ids=True,
        repetition_detection={"max_pattern_size": 2, "min_count": 4},
    )
    return choice["token_ids"], choice["finish_reason"]


def fields_that_change_no_answer(server: Server) -> object:
    return server.completed(user="someone", request_id="probe", priority=0)["text"]


def unknown_fields_are_accepted(server: Server) -> object:
    return server.completed(no_such_field={"x": 1})["text"]


def null_is_the_default_of_fields(server: Server) -> object:
    names = ("stop", "seed", "logprobs", "suffix", "user", "top_p", "presence_penalty", "logit_bias")
    return server.completed(**dict.fromkeys(names))["text"]


def the_model_may_be_left_out(server: Server) -> object:
    return server.complete(model=None)["choices"][0]["text"]


def a_system_fingerprint(server: Server) -> object:
    assert "system_fingerprint" in server.complete()
    return None
