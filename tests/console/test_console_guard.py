"""Which requests the console answers, and which may act."""

import pytest

from controller.console.endpoints import TOKEN, refusal, refusal_to_act

NAMES = frozenset({"gpu-host"})
GOOD = {"Host": "127.0.0.1:9000", "Origin": "http://127.0.0.1:9000", TOKEN: "word"}


@pytest.mark.parametrize(
    "host", ["127.0.0.1:9000", "10.1.2.3", "[::1]:9000", "localhost:9000", "LOCALHOST", "gpu-host:9000", "localhost.", ""]
)  # fmt: skip
def test_requests_to_addresses_and_the_hosts_own_name_are_answered(host: str) -> None:
    assert refusal({"Host": host}, NAMES) == ""


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9000", "127.0.0.1.evil.example", "[::1", "localhost.evil.example", "gpu-host.evil"]
)  # fmt: skip
def test_requests_to_a_foreign_name_are_refused(host: str) -> None:
    assert "localhost" in refusal({"Host": host}, NAMES)


@pytest.mark.parametrize(
    ("site", "good"), [("same-origin", True), ("none", True), ("cross-site", False), ("same-site", False)]
)
def test_a_page_of_another_origin_is_refused(site: str, good: bool) -> None:
    assert (refusal({"Host": "localhost", "Sec-Fetch-Site": site}, NAMES) == "") is good


def test_the_consoles_own_page_may_act() -> None:
    assert refusal_to_act(GOOD, NAMES, "word") == ""


@pytest.mark.parametrize(
    ("header", "value", "why"),
    [
        ("Host", "evil.example", "addresses"),
        ("Origin", "http://evil.example", "Origin"),
        ("Origin", "http://127.0.0.1:9001", "Origin"),
        ("Origin", "null", "Origin"),
        ("Origin", "", "Origin"),
        (TOKEN, "another", TOKEN),
        (TOKEN, "", TOKEN),
        (TOKEN, "wörd", TOKEN),
        ("Sec-Fetch-Site", "cross-site", "another origin"),
    ],
)
def test_other_pages_may_not_act(header: str, value: str, why: str) -> None:
    assert why in refusal_to_act({**GOOD, header: value}, NAMES, "word")
