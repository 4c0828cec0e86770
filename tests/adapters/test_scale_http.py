"""The scale subresource: the requests to it, and all kinds of failures."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from scale_world import WANTED, ScaleServer, status

from controller.adapters.scaling.http_hook import MERGE, HttpScaleHook
from controller.ports import HookResult
from events.errors import BadSetting


async def test_a_scale_is_changed_at_the_version_that_was_read(subresource: ScaleServer) -> None:
    assert await subresource.hook().scale(WANTED) == HookResult(True, "2 → 4 replicas")
    (get, _, _, _), (patch, _, headers, change) = subresource.asked
    assert (get, patch, headers["Content-Type"]) == ("GET", "PATCH", MERGE)
    assert change == {"spec": {"replicas": 4}, "metadata": {"resourceVersion": "7"}}
    assert "Authorization" not in headers
    assert subresource.replicas == 4


async def test_an_equal_number_of_replicas_is_not_changed(subresource: ScaleServer) -> None:
    subresource.replicas = 4
    assert await subresource.hook().scale(WANTED) == HookResult(True, "already 4 replicas")
    assert [method for method, *_ in subresource.asked] == ["GET"]


async def test_missing_replicas_count_as_zero(subresource: ScaleServer) -> None:
    subresource.replicas = 0
    assert await subresource.hook().scale(replace(WANTED, after=1)) == HookResult(True, "0 → 1 replica")


async def test_a_scale_without_a_version_is_changed_without_one(subresource: ScaleServer) -> None:
    subresource.shows_version = False
    assert (await subresource.hook().scale(WANTED)).ok
    assert subresource.asked[1][3] == {"spec": {"replicas": 4}}


async def test_a_concurrent_change_is_not_undone(subresource: ScaleServer) -> None:
    def scale_concurrently() -> None:
        subresource.replicas, subresource.version = 9, 8

    subresource.after_get = scale_concurrently
    result = await subresource.hook().scale(WANTED)
    assert not result.ok and result.says.startswith("HTTP 409: the object has been modified")
    assert subresource.replicas == 9


async def test_each_model_has_its_own_url_for_any_name(subresource: ScaleServer) -> None:
    hook = subresource.hook("/apis/{model}/scale?x=1")
    assert (await hook.scale(replace(WANTED, model="a b/c?ü%2F{model}"))).ok
    place = "/apis/a%20b%2Fc%3F%C3%BC%252F%7Bmodel%7D/scale?x=1"
    assert [path for _, path, *_ in subresource.asked] == [place, place]


async def test_the_token_is_read_at_each_call(subresource: ScaleServer, tmp_path: Path) -> None:
    token, seen = tmp_path / "token", []
    hook = subresource.hook(token_file=token)
    missing = await hook.scale(WANTED)
    assert missing == HookResult(False, f"the token file {token} cannot be read: No such file or directory")
    for word in ("first", "second"):
        token.write_text(f"{word}\n")
        await hook.scale(WANTED)
        seen.append(subresource.asked[-1][2]["Authorization"])
    assert seen == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("content", [b"", b"a\nb", b"\xff", "ü".encode()])
async def test_an_invalid_token_is_reported_without_its_content(
    subresource: ScaleServer, tmp_path: Path, content: bytes
) -> None:
    token = tmp_path / "token"
    token.write_bytes(content)
    result = await subresource.hook(token_file=token).scale(WANTED)
    assert not result.ok and str(token) in result.says
    assert not subresource.asked


REFUSALS: dict[str, tuple[Callable[[web.Request], web.Response], str]] = {
    "forbidden": (
        lambda _: status(403, 'deployments.apps "sim" is forbidden'),
        'HTTP 403: deployments.apps "sim" is forbidden',
    ),
    "no Status": (lambda _: web.Response(status=502, text="<html>oh</html>"), "HTTP 502: Bad Gateway"),
    "a strange Status": (lambda _: web.json_response({"message": ["x"]}, status=500), "HTTP 500: Internal Server Error"),
    "redirect": (
        lambda _: web.Response(status=307, headers={"Location": "http://elsewhere/"}),
        "HTTP 307: http://elsewhere/",
    ),
    "garbage": (lambda _: web.Response(text="{'kind'"), "the answer is not a Scale (autoscaling/v1)"),
    "brackets": (lambda _: web.Response(text="[" * 200_000), "the answer is not a Scale (autoscaling/v1)"),
    "another kind": (
        lambda _: web.json_response({"kind": "Deployment", "spec": {"replicas": 2}}),
        "the answer is not a Scale (autoscaling/v1)",
    ),
    "odd replicas": (
        lambda _: web.json_response({"kind": "Scale", "spec": {"replicas": "2"}}),
        "a Scale with '2' replicas of the version ''",
    ),
    "huge": (lambda _: web.Response(body=b"x" * 1_000_000), "HTTP 200: an answer of more than 256 KiB"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_bad_answer_is_reported(subresource: ScaleServer, name: str) -> None:
    subresource.instead, says = REFUSALS[name]
    assert await subresource.hook().scale(WANTED) == HookResult(False, says)
    assert len(subresource.asked) == 1, "no redirect was followed, and nothing was changed"


async def test_an_unreachable_or_untrusted_server_is_reported(
    subresource: ScaleServer, tmp_path: Path
) -> None:
    gone = await HttpScaleHook("http://127.0.0.1:1/scale").scale(WANTED)
    assert not gone.ok and gone.says.startswith("request failed: ")
    plain = await HttpScaleHook(subresource.url.replace("http", "https")).scale(WANTED)
    assert not plain.ok and plain.says.startswith("request failed: ")
    (tmp_path / "ca.pem").write_text("no certificate")
    for file in (tmp_path / "ca.pem", tmp_path / "nothing.pem"):
        result = await HttpScaleHook("https://127.0.0.1:1/scale", ca_file=file).scale(WANTED)
        assert not result.ok and result.says.startswith(f"the CA file {file} cannot be read: ")


@pytest.mark.parametrize(
    "url",
    ["", "host/scale", "ftp://host/scale", "http:///scale", "http://h:0/", "http://h:x/", "https://{model}/scale", "http://u:p@h/"],
)  # fmt: skip
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(BadSetting):
        HttpScaleHook(url)


def test_a_timeout_of_zero_is_refused() -> None:
    with pytest.raises(BadSetting):
        HttpScaleHook("http://host/scale", timeout_s=0)
