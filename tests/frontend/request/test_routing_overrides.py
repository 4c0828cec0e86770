"""Routing overrides: router settings in a client's headers."""

import pytest

from controller.frontend.errors import ApiError
from controller.frontend.request.routing_overrides import (
    OVERRIDABLE,
    RoutingOverrides,
    header,
    read_overrides,
)
from controller.frontend.settings import RouterSettings

OURS = RouterSettings(ttl_secs=7.0)


def override(**headers: str) -> RouterSettings | None:
    given = [(header(name).encode(), value.encode()) for name, value in headers.items()]
    return read_overrides([(b"Host", b"x"), *given, (b"X-Request-Id", b"1")], OURS).router


def test_without_overrides_the_frontends_own_settings_apply() -> None:
    assert read_overrides([(b"Host", b"x"), (b"X-Holdfast-Worker", b"w1")], OURS) == RoutingOverrides(
        None, False
    )


def test_an_explanation_can_be_requested() -> None:
    assert read_overrides([(b"X-Holdfast-Explain", b"1")], OURS) == RoutingOverrides(None, True)
    assert read_overrides([(b"X-Holdfast-Explain", b"0")], OURS) == RoutingOverrides(None, False)
    with pytest.raises(ApiError, match="the header X-Holdfast-Explain is 'yes': it must be 0 or 1"):
        read_overrides([(b"X-Holdfast-Explain", b"yes")], OURS)


def test_an_override_replaces_a_setting_and_is_named_like_its_flag() -> None:
    assert header("kv_overlap_score_credit") == "X-Holdfast-Router-Kv-Overlap-Score-Credit"
    got = override(mode="random", temperature="0.5", track_prefill_tokens="false")
    assert got == OURS.model_copy(
        update={"mode": "random", "temperature": 0.5, "track_prefill_tokens": False}
    )
    loud = read_overrides([(b"x-holdfast-ROUTER-mode", b" kv ")], OURS).router
    assert loud is not None and loud.mode == "kv"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("mode", "best", "the header X-Holdfast-Router-Mode is 'best': input should be 'kv', 'round-robin'"),
        ("temperature", "-1", "X-Holdfast-Router-Temperature is '-1': input should be greater than or equal"),
        ("temperature", "nan", "X-Holdfast-Router-Temperature is 'nan': input should be"),
        (
            "prefill_load_scale",
            "1e308",
            "Prefill-Load-Scale is '1e308': input should be less than or equal to",
        ),
        ("prefill_load_scale", "much", "Prefill-Load-Scale is 'much': input should be a valid number"),
        ("ttl_secs", "1", "X-Holdfast-Router-Ttl-Secs is unknown; available are X-Holdfast-Router-Mode"),
        ("moode", "kv", "X-Holdfast-Router-Moode is unknown"),
    ],
)
def test_an_invalid_override_is_refused_with_a_message(name: str, value: str, says: str) -> None:
    with pytest.raises(ApiError, match=says.replace(".", r"\.")) as caught:
        override(**{name: value})
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        400,
        "invalid_value",
        header(name),
    )


@pytest.mark.parametrize("name", ["X-Holdfast-Router-Temperature", "X-Holdfast-Explain"])
def test_a_repeated_override_is_refused(name: str) -> None:
    twice = [(name.encode(), b"1"), (name.lower().encode(), b"0")]
    with pytest.raises(ApiError, match=f"the header {name} is given more than once"):
        read_overrides(twice, OURS)
    read_overrides([(b"X-Holdfast-Worker", b"w1"), (b"X-Holdfast-Worker", b"w2")], OURS)


def test_every_override_is_a_setting() -> None:
    assert set(OVERRIDABLE) <= set(RouterSettings.model_fields)
