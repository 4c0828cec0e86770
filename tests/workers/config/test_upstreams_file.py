"""The file of upstreams: defaults, relative paths, and errors with line, entry and field."""

from pathlib import Path

import pytest

from workers.config.upstream_route import UpstreamTls
from workers.config.upstreams import (
    ERRORS_MAX,
    BadUpstreams,
    UpstreamEntry,
    load_upstreams,
    parse_upstreams,
    read_upstreams,
)

GOOD = """\
defaults:
  key_file: key
  headers: {X-Team: search}
upstreams:
  - name: gpu1
    url: https://gpu1:8000
    tls: {ca_file: ca.pem, server_name: gpu}
    limits: {requests_max: 32}
    weight: 0.5
  - {name: gpu2, url: "http://gpu2:8000", headers: {}, pause: true}
"""


def entry(fields: str) -> str:
    return f"upstreams:\n  - {{name: a, url: 'https://a', {fields}}}\n"


def error(text: str) -> str:
    with pytest.raises(BadUpstreams) as raised:
        parse_upstreams(text.encode(), "up.yaml")
    return str(raised.value)


def test_an_entrys_own_field_replaces_the_default() -> None:
    first, second = parse_upstreams(GOOD.encode())
    assert (first.name, first.url, first.weight, first.pause) == ("gpu1", "https://gpu1:8000", 0.5, False)
    assert first.tls == UpstreamTls(ca_file="ca.pem", server_name="gpu")
    assert (first.limits.requests_max, first.limits.waiting_max) == (32, 256)
    assert (first.key_file, first.headers) == ("key", {"X-Team": "search"})
    assert (second.key_file, second.headers, second.pause) == ("key", {}, True)


def test_relative_paths_begin_at_the_files_folder(tmp_path: Path) -> None:
    first, _ = load_upstreams(tmp_path / "up.yaml", GOOD.encode())
    assert (first.key_file, first.tls.ca_file) == (str(tmp_path / "key"), str(tmp_path / "ca.pem"))
    assert first.model == ""


def test_only_an_empty_list_stops_all_upstreams() -> None:
    assert parse_upstreams(b"upstreams: []\n") == ()
    assert "up.yaml:1: expected a mapping" in error("")
    assert "upstreams: expected a list; write [] for none" in error("upstreams:\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (entry("wieght: 1"), "up.yaml:2: upstreams[0] (a): wieght: unknown field; the fields are name, url"),
        (entry("weight: 0"), "upstreams[0] (a): weight: expected `float` > 0.0"),
        (entry("weight: heavy"), "weight: expected `float`, got `str`"),
        (entry("limits: {requests_max: 0}"), "limits.requests_max: expected `int` >= 1"),
        (entry("tls: {ca: x}"), "tls: object contains unknown field `ca`"),
        (entry("tls: {key_file: x}"), "tls.key_file: requires tls.cert_file"),
        (entry("tls: {ca_file: x, verify: false}"), "tls.verify: false contradicts tls.ca_file"),
        (entry("headers: {Host: b}"), "headers.Host: not a header that can be set"),
        (entry('headers: {X-A: "b\\r\\nc"}'), "headers.X-A: the value must be printable text"),
        (entry("key_file: k, headers: {authorization: b}"), "headers.authorization: key_file sets this header"),
        (entry("proxy: 'socks5://p'"), "proxy: expected a URL such as http://gpu1:8000"),
        (entry("kv_events: ['http://a:1']"), "kv_events: 'http://a:1' is not an endpoint (tcp://host:5557)"),
        (entry("kv_replay: ['tcp://a:1']"), "kv_replay: 1 endpoints, kv_events has 0"),
        (entry("discover: mdns"), "discover: invalid enum value 'mdns'"),
        (entry("discover: dns, kv_events: ['tcp://a:1']"), "kv_events: not possible with discover"),
        ("upstreams:\n  - url: http://a\n", "up.yaml:2: upstreams[0]: name: missing"),
        ("upstreams:\n  - {name: a.b, url: 'http://a'}\n", "name = 'a.b': use letters, digits, - and _"),
        ("upstreams:\n  - {name: a, url: 'gpu1:8000'}\n", "upstreams[0] (a): url: expected a URL such as http://"),
        ("upstreams:\n  - {name: a, url: 'http://a', tls: {verify: false}}\n", "tls: only valid with an https:// URL"),
        ("upstreams:\n  - gpu1\n", "up.yaml:2: upstreams[0]: expected a mapping with name and url"),
        ("upstreams: gpu1\n", "upstreams: expected a list"),
        ("servers: []\n", "up.yaml:1: expected a mapping with the keys upstreams and, optionally, defaults"),
        ("defaults: {url: x}\nupstreams: []\n", "up.yaml:1: defaults.url: each upstream has its own"),
        ("defaults:\n  weight: 2\nupstreams: []\n", "up.yaml:2: defaults.weight: expected `float` <= 1.0"),
        ("upstreams:\n  - {name: a\n", "up.yaml:3: "),
        ("upstreams:\n  - name: a\n    url: http://a\n    name: b\n", "up.yaml:4: the key 'name' occurs twice"),
        ("upstreams: !!python/object:os.system {}\n", "up.yaml:1: could not determine a constructor"),
    ],
)  # fmt: skip
def test_an_error_names_the_line_the_entry_and_the_field(text: str, why: str) -> None:
    assert why in error(text)


@pytest.mark.parametrize("field", ["name", "url"])
def test_each_upstream_is_listed_once(field: str) -> None:
    fields = {"name": "b", "url": "http://b", field: {"name": "a", "url": "http://a"}[field]}
    text = (
        "upstreams:\n  - {name: a, url: 'http://a'}\n"
        + f"  - {{name: {fields['name']}, url: '{fields['url']}'}}\n"
    )
    assert f"up.yaml:3: upstreams[1] ({fields['name']}): {field}: equal to that of a" in error(text)


def test_all_errors_are_reported_together() -> None:
    listed = "".join(f"  - {{name: g{n}, url: 7}}\n" for n in range(ERRORS_MAX + 2))
    found = error(f"upstreams:\n{listed}").split("; ")
    assert [one.partition(":")[2].partition(":")[0] for one in found[:2]] == ["2", "3"]
    assert found[-1] == "and 2 more errors"


def test_a_header_is_never_shown() -> None:
    secret = UpstreamEntry(name="a", url="http://a", headers={"X-Key": "secret"})
    assert "secret" not in repr(secret)
    assert "secret" not in error(entry("headers: {X-Key: [secret]}"))


def test_an_unreadable_file_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadUpstreams, match=r"up\.yaml cannot be read: No such file or directory"):
        read_upstreams(tmp_path / "up.yaml")
