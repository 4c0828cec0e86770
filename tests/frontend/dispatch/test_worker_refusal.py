"""A worker's refusal reaches the client as a sentence of ours, with listed field names and sizes only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.frontend.dispatch.worker_refusal import as_api_error
from events.refusal import RequestRefusal

NOT_PASSED_ON = ". Its own text is not passed on"


@pytest.mark.parametrize(
    "ours",
    [
        "the prompt is empty",
        "17 tokens leave no room in a context of 16",
        "logit_bias: token ids go from 0 to 319",
        "allowed_token_ids: token ids go from 0 to 319",
        "bad_words: token ids go from 0 to 319",
        "bad_words is not supported: this model's server does not obey it",
        "prompt_logprobs is not supported: this model's server gives no logprobs of a prompt",
        "guided_json is not supported: this model's server does not constrain its answers by it",
    ],
)
def test_a_sentence_of_our_own_engines_is_passed_on(ours: str) -> None:
    assert str(as_api_error(RequestRefusal(ours))) == ours


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            RequestRefusal("max_tokens must be at least 1, got 0. \x1b[2J<script>", 400),
            "the model server refused the request (HTTP 400; it names max_tokens)" + NOT_PASSED_ON,
        ),
        (
            RequestRefusal("'bogus' is no type", 422, param="response_format.json_schema"),
            "the model server refused the request (HTTP 422; it names response_format)" + NOT_PASSED_ON,
        ),
        (
            RequestRefusal("my secret_word is 7", 418, type="<b>", param="secret_word"),
            "the model server refused the request (HTTP 400; it names no field)" + NOT_PASSED_ON,
        ),
        (
            RequestRefusal(
                "This model's maximum context length is 4096 tokens. However, you asked for 5000", 400
            ),
            "the model server refused the request: prompt and answer exceed its context of 4096 tokens",
        ),
    ],
)
def test_a_servers_text_is_replaced_by_a_sentence_of_ours(said: RequestRefusal, sentence: str) -> None:
    assert str(as_api_error(said)) == sentence


def test_an_unlisted_status_becomes_a_400() -> None:
    """401 would make a client discard its key, 429 would make it retry."""
    assert [as_api_error(RequestRefusal("no", status)).status for status in (401, 429, 451, 413)] == [
        400, 400, 400, 413,
    ]  # fmt: skip


def test_type_and_param_are_passed_on_from_a_list() -> None:
    error = as_api_error(RequestRefusal("no", 400, "BadRequestError", "tools[0].function"))
    assert (error.kind, error.param) == ("BadRequestError", "tools")
    error = as_api_error(RequestRefusal("no", 400, "owned", "owned"))
    assert (error.kind, error.param) == ("invalid_request_error", None)


@given(st.text(min_size=20, alphabet=st.characters(codec="utf-8", categories=("Lu", "Cc", "Cf", "So"))))
def test_no_text_is_passed_on(said: str) -> None:
    told = as_api_error(RequestRefusal(said, 400, said, said)).body()["error"]
    assert said not in str(told) and all(c.isprintable() for c in str(told["message"]))
