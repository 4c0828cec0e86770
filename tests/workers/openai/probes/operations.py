"""Probes of everything but answers: models, health, tokens."""

from probe import CHATS, COMPLETIONS, GREEDY, PROMPT, SAID, Server, usage


def the_models(server: Server) -> object:
    listed = server.get("/v1/models").good
    assert listed["object"] == "list"
    found = [one for one in listed["data"] if one["id"] == "tiny"]
    assert len(found) == 1 and found[0]["object"] == "model" and isinstance(found[0]["created"], int)
    return found[0]["max_model_len"]


def a_model_has_its_owner_and_root(server: Server) -> object:
    found = server.get("/v1/models").good["data"][0]
    assert isinstance(found["owned_by"], str) and "root" in found and "parent" in found
    return None


def the_version(server: Server) -> object:
    assert isinstance(server.get("/version").good["version"], str)
    return None


def the_health(server: Server) -> object:
    return server.get("/health").status


def the_ping(server: Server) -> object:
    return server.get("/ping").status, server.send("POST", "/ping").status


def the_load(server: Server) -> object:
    assert isinstance(server.get("/load").good["server_load"], int)
    return None


def the_metrics(server: Server) -> object:
    reply = server.get("/metrics")
    assert (
        reply.status == 200
        and "# TYPE" in reply.text
        and reply.headers["content-type"].startswith("text/plain")
    )
    return None


def the_openapi_document(server: Server) -> object:
    paths = server.get("/openapi.json").good["paths"]
    assert CHATS in paths and COMPLETIONS in paths
    return None


def the_tokens_of_a_text(server: Server) -> object:
    found = server.post("/tokenize", prompt=PROMPT).good
    assert found["count"] == len(found["tokens"]) and found["token_strs"] is None
    return found


def the_tokens_of_a_text_without_special_ones(server: Server) -> object:
    return server.post("/tokenize", prompt=PROMPT, add_special_tokens=False).good["tokens"]


def the_names_of_tokens(server: Server) -> object:
    found = server.post("/tokenize", prompt="naïve 日本", return_token_strs=True).good
    assert len(found["token_strs"]) == found["count"]
    return found["token_strs"]


def the_tokens_of_a_chat(server: Server) -> object:
    found = server.post("/tokenize", messages=SAID).good
    assert found["count"] == usage(server.chat())[0]
    return found["tokens"]


def the_tokens_of_a_chat_without_a_generation_prompt(server: Server) -> object:
    return server.post("/tokenize", messages=SAID, add_generation_prompt=False).good["tokens"]


def the_tokens_of_a_continued_chat(server: Server) -> object:
    said = [*SAID, {"role": "assistant", "content": "one, two"}]
    return server.post(
        "/tokenize", messages=said, add_generation_prompt=False, continue_final_message=True
    ).good["tokens"]


def the_tokens_of_a_chat_with_tools(server: Server) -> object:
    tool = {"type": "function", "function": {"name": "time", "description": "The time.", "parameters": {}}}
    return server.post("/tokenize", messages=SAID, tools=[tool]).good["tokens"]


def the_tokens_of_a_chat_by_another_template(server: Server) -> object:
    template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    return server.post("/tokenize", messages=SAID, chat_template=template).good["tokens"]


def the_text_of_tokens(server: Server) -> object:
    tokens = server.post("/tokenize", prompt=PROMPT).good["tokens"]
    assert server.post("/detokenize", tokens=tokens).good["prompt"] == PROMPT
    return None


def the_text_of_special_tokens(server: Server) -> object:
    return server.post("/detokenize", tokens=[1, 300, 2]).good["prompt"]


def the_text_of_no_tokens(server: Server) -> object:
    return server.post("/detokenize", tokens=[]).good["prompt"]


def tokens_without_the_models_name(server: Server) -> object:
    return server.post("/tokenize", model=None, prompt=PROMPT).good["tokens"]


def tokens_of_an_unknown_model(server: Server) -> object:
    return server.post("/tokenize", model="no-such-model", prompt=PROMPT).refused(404)


def the_text_of_a_token_outside_the_vocabulary(server: Server) -> object:
    return server.post("/detokenize", tokens=[10**12]).refused(400)


def the_text_of_something_else(server: Server) -> object:
    return server.post("/detokenize", tokens=["x"]).refused(400)


def an_invocation_of_a_chat(server: Server) -> object:
    whole = server.post("/invocations", messages=SAID, **GREEDY).good
    assert whole["object"] == "chat.completion"
    return whole["choices"][0]["message"]["content"]


def an_invocation_of_a_completion(server: Server) -> object:
    whole = server.post("/invocations", prompt=PROMPT, **GREEDY).good
    assert whole["object"] == "text_completion"
    return whole["choices"][0]["text"]


def several_chats_at_once(server: Server) -> object:
    whole = server.post("/v1/chat/completions/batch", messages=[SAID, SAID], **GREEDY).good
    return [one["message"]["content"] for one in whole["choices"]]


def an_id_of_the_clients_own(server: Server) -> object:
    reply = server.post(COMPLETIONS, {"X-Request-Id": "probe-17"}, prompt=PROMPT, **GREEDY)
    assert "probe-17" in reply.good["id"]
    return None
