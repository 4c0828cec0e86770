"""Admission headers: Holdfast's, llm-d's, and those of OpenAI's client."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.frontend.errors import ApiError
from controller.frontend.openai.request_head import (
    CLIENT_CHARS_MAX,
    NOTHING,
    AdmissionHeaders,
    read_admission,
)


def read(**headers: str) -> AdmissionHeaders:
    return read_admission(
        [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    )


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, NOTHING),
        ({"Accept": "*/*"}, NOTHING),
        ({"X_Holdfast_TTFT_Deadline_Ms": "250"}, AdmissionHeaders(deadline_s=0.25)),
        ({"x_llm_d_slo_ttft_ms": "1500"}, AdmissionHeaders(deadline_s=1.5)),
        (
            {"x_llm_d_slo_ttft_ms": "1500", "X_Holdfast_TTFT_Deadline_Ms": "250"},
            AdmissionHeaders(deadline_s=0.25),
        ),
        ({"X_Holdfast_Queue_TTL_Ms": "100"}, AdmissionHeaders(line_s=0.1)),
        ({"x_llm_d_inference_ttl": "1m1.5s"}, AdmissionHeaders(line_s=61.5)),
        ({"x_llm_d_inference_ttl": "0s"}, NOTHING),
        ({"X_Holdfast_Client": "team-a"}, AdmissionHeaders(header="team-a")),
        ({"x_llm_d_inference_fairness_id": "t"}, AdmissionHeaders(header="t")),
        ({"X_Stainless_Retry_Count": "2"}, AdmissionHeaders(retries=2)),
    ],
)
def test_headers_are_parsed(headers: dict[str, str], says: AdmissionHeaders) -> None:
    assert read(**headers) == says


def test_a_key_is_kept_only_as_a_digest() -> None:
    one, same, other = (read(Authorization=f"Bearer {key}") for key in ("sk-1", "sk-1", "sk-2"))
    assert read(**{"x-api-key": "sk-1"}) == one
    assert one == same != other
    assert "sk-1" not in repr(one) and one.api_key


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        (
            {"X_Holdfast_TTFT_Deadline_Ms": "soon"},
            "X-Holdfast-TTFT-Deadline-Ms is 'soon': expected milliseconds",
        ),
        ({"X_Holdfast_TTFT_Deadline_Ms": "0"}, "X-Holdfast-TTFT-Deadline-Ms"),
        ({"X_Holdfast_TTFT_Deadline_Ms": "-5"}, "X-Holdfast-TTFT-Deadline-Ms"),
        ({"X_Holdfast_TTFT_Deadline_Ms": "nan"}, "X-Holdfast-TTFT-Deadline-Ms"),
        ({"x_llm_d_slo_ttft_ms": "inf"}, "x-llm-d-slo-ttft-ms"),
        ({"X_Holdfast_Queue_TTL_Ms": "1s"}, "X-Holdfast-Queue-TTL-Ms"),
        ({"x_llm_d_inference_ttl": "1.5"}, "x-llm-d-inference-ttl is '1.5': expected a duration such as"),
        ({"x_llm_d_inference_ttl": "9999h"}, "x-llm-d-inference-ttl"),
        ({"X_Holdfast_Client": "x" * (CLIENT_CHARS_MAX + 1)}, "X-Holdfast-Client"),
        ({"X_Stainless_Retry_Count": "-1"}, "X-Stainless-Retry-Count is '-1': expected a number"),
    ],
)
def test_an_invalid_header_is_refused_by_its_name(headers: dict[str, str], named: str) -> None:
    with pytest.raises(ApiError, match=named.replace("(", r"\(")) as refused:
        read(**headers)
    assert refused.value.status == 400


def test_a_repeated_header_is_refused() -> None:
    with pytest.raises(ApiError, match="X-Holdfast-Client is given more than once"):
        read_admission([(b"X-Holdfast-Client", b"a"), (b"x-holdfast-client", b"b")])


@pytest.mark.parametrize(
    ("by", "client"),
    [
        (("header", "api_key", "user"), "header:h"),
        (("api_key", "header"), "api_key:k"),
        (("user",), "user:u"),
        ((), ""),
    ],
)
def test_the_client_of_a_request_is_its_first_available_key(by: Any, client: str) -> None:
    assert AdmissionHeaders(header="h", api_key="k").client(by, "u") == client
    assert NOTHING.client(by, "") == ""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1500ms", 1.5),
        ("1h2m3s", 3723.0),
        (".5s", 0.5),
        ("2.5m", 150.0),
        ("10us", 1e-5),
        ("0", 0.0),
        ("", None),
        ("1", None),
        ("s", None),
        ("1 s", None),
        ("-1s", None),
        ("1x", None),
        ("1s1", None),
    ],
)
def test_durations_are_parsed_in_gos_format(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ApiError, match="expected a duration"):
            read(x_llm_d_inference_ttl=text)
    else:
        assert read(x_llm_d_inference_ttl=text).line_s == (pytest.approx(seconds) if seconds else None)


HEADERS = st.sampled_from((b"x-holdfast-ttft-deadline-ms", b"x-llm-d-inference-ttl", b"authorization"))


@given(st.dictionaries(HEADERS, st.binary()))
def test_any_bytes_are_parsed_or_refused(headers: dict[bytes, bytes]) -> None:
    try:
        read_admission(headers.items())
    except ApiError as error:
        assert error.status == 400
