"""The headers of a refusal: reason, retry time, and whether to retry."""

import pytest

from controller.frontend.errors import ApiError, shed, unavailable, unknown_model


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (
            ApiError(429, "late", code="deadline", retry_after_s=0.25),
            {"Retry-After": "1", "retry-after-ms": "250", "X-Holdfast-Refused": "deadline"},
        ),
        (
            ApiError(429, "late", code="deadline", retry_after_s=1.2, should_retry=False),
            {
                "Retry-After": "2",
                "retry-after-ms": "1200",
                "X-Holdfast-Refused": "deadline",
                "x-should-retry": "false",
            },
        ),
        (
            unavailable("no worker", "no_worker", 30),
            {"Retry-After": "30", "retry-after-ms": "30000", "X-Holdfast-Refused": "no_worker"},
        ),
        (
            shed("best_effort"),
            {"Retry-After": "30", "retry-after-ms": "30000", "X-Holdfast-Refused": "capacity_shed"},
        ),
        (
            ApiError(422, "never", code="deadline_unattainable", should_retry=False),
            {"X-Holdfast-Refused": "deadline_unattainable", "x-should-retry": "false"},
        ),
        (unknown_model("m"), {}),
        (ApiError(405, "no", code="method_not_allowed", allow="GET"), {"Allow": "GET"}),
    ],
)
def test_the_headers_of_a_refusal(error: ApiError, headers: dict[str, str]) -> None:
    assert error.headers == headers


@pytest.mark.parametrize("code", ["deadline", "retry_budget"])
def test_a_refusal_by_deadline_counts_as_overload_and_not_as_failure(code: str) -> None:
    error = ApiError(429, "late", code=code)
    assert (error.refusal, error.error_type) == ("overload", "overload")


def test_a_request_that_no_worker_can_serve_is_not_an_overload() -> None:
    error = ApiError(422, "never", code="deadline_unattainable")
    assert error.refusal == error.error_type == "deadline_unattainable"
