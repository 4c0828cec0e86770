"""Probes of a server that computes vectors: embeddings, scores, ranks, poolings."""

import base64
import struct
from typing import Any

from probe import SAID, Server

TEXTS = ["def answer():", "import os", "class Question:"]


def _vectors(server: Server, input: object, **fields: Any) -> list[list[float]]:
    whole = server.post("/v1/embeddings", input=input, **fields).good
    assert whole["object"] == "list" and whole["model"] == "tiny"
    assert [one["index"] for one in whole["data"]] == list(range(len(whole["data"])))
    assert whole["usage"]["prompt_tokens"] == whole["usage"]["total_tokens"] > 0
    found: list[list[float]] = [one["embedding"] for one in whole["data"]]
    return found


def a_vector_of_a_text(server: Server) -> object:
    (vector,) = _vectors(server, "What is the answer?")
    assert len(vector) == 256 and abs(sum(one * one for one in vector) - 1) < 1e-3
    return vector


def vectors_of_several_texts(server: Server) -> object:
    return _vectors(server, TEXTS)


def a_vector_of_token_ids(server: Server) -> object:
    return _vectors(server, [300, 301, 302])


def vectors_of_lists_of_token_ids(server: Server) -> object:
    return _vectors(server, [[300, 301], [302]])


def a_vector_of_a_chat(server: Server) -> object:
    whole = server.post("/v1/embeddings", messages=SAID).good
    return whole["data"][0]["embedding"], whole["usage"]["prompt_tokens"]


def a_vector_as_base64(server: Server) -> object:
    (packed,) = _vectors(server, "x", encoding_format="base64")
    data = base64.b64decode(packed)  # type: ignore[arg-type]
    numbers = list(struct.unpack(f"<{len(data) // 4}f", data))
    (vector,) = _vectors(server, "x", encoding_format="float")
    assert max(abs(a - b) for a, b in zip(numbers, vector, strict=True)) < 1e-3
    return numbers


def a_vector_of_a_truncated_text(server: Server) -> object:
    whole = server.post("/v1/embeddings", input="one two three four five six", truncate_prompt_tokens=3).good
    assert whole["usage"]["prompt_tokens"] == 3
    return whole["data"][0]["embedding"]


def fewer_dimensions_are_refused(server: Server) -> object:
    return server.post("/v1/embeddings", input="x", dimensions=7).refused()


def a_vector_of_no_text_is_refused(server: Server) -> object:
    return server.post("/v1/embeddings").refused()


def a_vector_of_a_long_text_is_refused(server: Server) -> object:
    return server.post("/v1/embeddings", input="zq " * 20_000).refused()


def a_vector_of_an_unknown_model_is_refused(server: Server) -> object:
    return server.post("/v1/embeddings", model="no-such-model", input="x").refused(404)


def the_pooled_states(server: Server) -> object:
    whole = server.post("/pooling", input="What is the answer?", task="embed").good
    return whole["data"][0]["data"]


def a_score_of_two_texts(server: Server) -> object:
    whole = server.post("/score", text_1="What is the answer?", text_2="42").good
    return [one["score"] for one in whole["data"]]


def scores_of_several_texts(server: Server) -> object:
    whole = server.post("/v1/score", text_1="What is the answer?", text_2=TEXTS).good
    assert [one["index"] for one in whole["data"]] == [0, 1, 2]
    return [one["score"] for one in whole["data"]]


def ranks_of_documents(server: Server) -> object:
    whole = server.post("/rerank", query="answer", documents=TEXTS).good
    scores = [one["relevance_score"] for one in whole["results"]]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3
    return [(one["index"], one["relevance_score"]) for one in whole["results"]]


def the_best_documents(server: Server) -> object:
    for path in ("/v1/rerank", "/v2/rerank"):
        whole = server.post(path, query="answer", documents=TEXTS, top_n=1).good
        assert len(whole["results"]) == 1
    return whole["results"][0]["index"]


def vectors_by_coheres_api(server: Server) -> object:
    whole = server.post("/v2/embed", texts=TEXTS, embedding_types=["float"]).good
    return whole["embeddings"]["float"]


def classes_of_a_model_without_classes(server: Server) -> object:
    assert server.post("/classify", input="x").status in (400, 404)
    return None


def a_chat_with_a_model_of_vectors(server: Server) -> object:
    assert server.post("/v1/chat/completions", messages=SAID).status in (400, 404)
    return None


def an_invocation_of_vectors(server: Server) -> object:
    return server.post("/invocations", input="x").good["data"][0]["embedding"]


def the_models_of_a_server_of_vectors(server: Server) -> object:
    return [one["id"] for one in server.get("/v1/models").good["data"]]


def the_tokens_of_a_text_for_a_vector(server: Server) -> object:
    return server.post("/tokenize", prompt="x y z").good["tokens"]
