"""Probes of mistakes: the status of a refusal, and that the error can be read."""

import base64

from probe import CHATS, COMPLETIONS, SAID, Server

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


def an_unknown_model(server: Server) -> object:
    return server.refuses(404, model="no-such-model")


def an_unknown_model_of_a_chat(server: Server) -> object:
    return server.refuses(404, path=CHATS, model="no-such-model")


def no_prompt(server: Server) -> object:
    return server.post(COMPLETIONS, max_tokens=1).refused()


def no_messages(server: Server) -> object:
    return server.post(CHATS, max_tokens=1).refused()


def an_empty_list_of_messages(server: Server) -> object:
    return server.refuses(path=CHATS, messages=[])


def an_empty_list_of_prompts(server: Server) -> object:
    return server.refuses(prompt=[])


def an_empty_prompt(server: Server) -> object:
    return server.refuses(prompt="")


def a_prompt_of_no_tokens(server: Server) -> object:
    return server.refuses(prompt=[[]])


def a_prompt_that_is_a_number(server: Server) -> object:
    return server.refuses(prompt=7.5)


def a_token_outside_the_vocabulary(server: Server) -> object:
    return server.refuses(prompt=[300, 1_000_000])


def a_negative_token(server: Server) -> object:
    return server.refuses(prompt=[300, -1])


def a_prompt_longer_than_the_context(server: Server) -> object:
    return server.refuses(prompt=[300] * 5000)


def a_chat_longer_than_the_context(server: Server) -> object:
    return server.refuses(path=CHATS, messages=[{"role": "user", "content": "zq " * 20_000}])


def more_tokens_than_the_context(server: Server) -> object:
    return server.refuses(max_tokens=5000)


def more_tokens_of_a_chat_than_the_context(server: Server) -> object:
    return server.refuses(path=CHATS, max_tokens=5000)


def negative_max_tokens(server: Server) -> object:
    return server.refuses(max_tokens=-1)


def a_negative_temperature(server: Server) -> object:
    return server.refuses(temperature=-1)


def a_temperature_that_is_text(server: Server) -> object:
    return server.refuses(temperature="warm")


def top_p_of_nothing(server: Server) -> object:
    return server.refuses(top_p=0)


def top_p_of_more_than_everything(server: Server) -> object:
    return server.refuses(top_p=1.5)


def a_negative_top_k(server: Server) -> object:
    return server.refuses(top_k=-5)


def min_p_of_more_than_everything(server: Server) -> object:
    return server.refuses(min_p=2)


def no_answers(server: Server) -> object:
    return server.refuses(n=0)


def an_excessive_presence_penalty(server: Server) -> object:
    return server.refuses(presence_penalty=3)


def an_excessive_frequency_penalty(server: Server) -> object:
    return server.refuses(frequency_penalty=-3)


def a_repetition_penalty_of_nothing(server: Server) -> object:
    return server.refuses(repetition_penalty=0)


def more_tokens_at_least_than_at_most(server: Server) -> object:
    return server.refuses(min_tokens=10, max_tokens=5)


def a_seed_that_is_text(server: Server) -> object:
    return server.refuses(seed="x")


def too_many_logprobs(server: Server) -> object:
    return server.refuses(logprobs=21)


def too_many_logprobs_of_a_chat(server: Server) -> object:
    return server.refuses(path=CHATS, logprobs=True, top_logprobs=21)


def alternatives_without_logprobs(server: Server) -> object:
    return server.refuses(path=CHATS, top_logprobs=2)


def too_many_logprobs_of_a_stream(server: Server) -> object:
    reply = server.post(CHATS, messages=SAID, logprobs=True, top_logprobs=30, stream=True)
    assert "error" in reply.text and "logprobs" in reply.text  # as a response, or as an event
    return None


def too_many_logprobs_of_a_prompt(server: Server) -> object:
    return server.refuses(prompt_logprobs=30)


def logprobs_of_the_prompt_of_a_stream(server: Server) -> object:
    return server.refuses(prompt_logprobs=1, stream=True)


def a_bias_of_a_token_outside_the_vocabulary(server: Server) -> object:
    return server.refuses(logit_bias={"1000000": 1.0})


def a_bias_of_a_token_that_is_no_number(server: Server) -> object:
    return server.refuses(logit_bias={"x": 1.0})


def an_allowed_token_outside_the_vocabulary(server: Server) -> object:
    return server.refuses(allowed_token_ids=[1_000_000])


def no_allowed_tokens(server: Server) -> object:
    return server.refuses(allowed_token_ids=[])


def an_empty_bad_word(server: Server) -> object:
    return server.refuses(bad_words=[""])


def a_suffix(server: Server) -> object:
    return server.refuses(suffix="the end")


def options_of_a_stream_without_a_stream(server: Server) -> object:
    return server.refuses(stream_options={"include_usage": True})


def an_empty_salt(server: Server) -> object:
    return server.refuses(cache_salt="")


def an_embedded_prompt(server: Server) -> object:
    encoded = base64.b64encode(b"no tensor").decode()
    return server.post(COMPLETIONS, prompt_embeds=encoded, max_tokens=1).refused()


def a_stop_string_that_is_a_number(server: Server) -> object:
    return server.refuses(stop=[7])


def an_image(server: Server) -> object:
    return server.refuses(path=CHATS, messages=[{"role": "user", "content": [IMAGE]}])


def a_sound(server: Server) -> object:
    return server.refuses(path=CHATS, messages=[{"role": "user", "content": [SOUND]}])


def an_unknown_part_of_a_message(server: Server) -> object:
    return server.refuses(
        path=CHATS, messages=[{"role": "user", "content": [{"type": "smell", "smell": "x"}]}]
    )


def a_message_without_a_role(server: Server) -> object:
    return server.refuses(path=CHATS, messages=[{"content": "x"}])


def messages_that_are_text(server: Server) -> object:
    return server.refuses(path=CHATS, messages="x")


def a_continued_message_with_a_generation_prompt(server: Server) -> object:
    said = [*SAID, {"role": "assistant", "content": "one"}]
    return server.refuses(path=CHATS, messages=said, continue_final_message=True, add_generation_prompt=True)


def a_body_that_is_no_json(server: Server) -> object:
    return server.send("POST", CHATS, b"{'model': }").refused()


def a_body_that_is_a_list(server: Server) -> object:
    return server.send("POST", CHATS, b"[]").refused()


def an_empty_body(server: Server) -> object:
    return server.send("POST", COMPLETIONS, b"").refused()


def a_form_instead_of_json(server: Server) -> object:
    reply = server.post(CHATS, {"Content-Type": "application/x-www-form-urlencoded"}, messages=SAID)
    return reply.refused(400, 415, 422)


def the_wrong_method(server: Server) -> object:
    reply = server.get(CHATS)
    assert reply.status == 405
    return reply.status


def an_unknown_path(server: Server) -> object:
    reply = server.post("/v1/no/such/path")
    assert reply.status == 404
    return reply.status


def the_server_answers_after_mistakes(server: Server) -> object:
    server.refuses(temperature=-1)
    server.refuses(logprobs=99)
    return server.completed()["text"]


def sound_for_a_model_of_texts(server: Server) -> object:
    reply = server.post("/v1/audio/transcriptions")
    assert reply.status in (400, 404)
    return None


def vectors_of_a_model_of_texts(server: Server) -> object:
    reply = server.post("/v1/embeddings", input="x")
    assert reply.status in (400, 404)
    return None


def scores_of_a_model_of_texts(server: Server) -> object:
    reply = server.post("/score", text_1="x", text_2="y")
    assert reply.status in (400, 404)
    return None


def a_thinking_budget_without_reasoning(server: Server) -> object:
    return server.refuses(path=CHATS, thinking_token_budget=-5)
