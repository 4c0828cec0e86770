"""API keys and TLS: a client needs a key of the file.

Reloading keys or certificates closes no connection.
"""

import argparse
import asyncio
import logging
import os
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import structlog
from certificates import certificate
from frontend_kit import Kit, frontend
from scripted_worker import ScriptedWorker

from controller.frontend.http.credentials import ApiKeys, Tls, check_open_port, read_keys
from controller.frontend.http.listeners import Listeners
from controller.frontend.settings import FrontendSettings
from controller.processes.up_checks import check_front_port
from controller.processes.up_flags import add_arguments
from events.errors import BadSetting

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
KEY, OTHER = "sk-first-0123456789", "sk-second-0123456789"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with two keys."""
    path = tmp_path / "keys"
    path.write_text(f"# clients\n\nteam-a:{KEY}\n{OTHER}\n")
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def replaced(path: Path, text: str) -> None:
    """Replace a file as a secret manager does."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)


async def status_of(kit: Kit, path: str, headers: dict[str, str] | None = None, **body: Any) -> int:
    if body:
        return (await kit.post(path, headers, **body))[0]
    async with kit.http.get(kit.url + path, headers=headers) as answer:
        return answer.status


async def test_a_client_needs_a_key_on_every_path_except_probes(keys: Path) -> None:
    async with frontend(ScriptedWorker(), api_key_file=str(keys)) as kit:
        for key in (KEY, OTHER):
            assert await status_of(kit, "/v1/chat/completions", bearer(key), **CHAT) == 200
            assert await status_of(kit, "/v1/models", bearer(key)) == 200
        for headers in (
            {},
            bearer("sk-none"),
            bearer(""),
            {"Authorization": KEY},
            {"Authorization": f"Basic {KEY}"},
        ):
            assert await status_of(kit, "/v1/chat/completions", headers, **CHAT) == 401
            for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nowhere"):
                assert await status_of(kit, path, headers) == 401
            assert await status_of(kit, "/tokenize", headers, model="m", prompt="a") == 401
        for path in ("/health", "/ready", "/live", "/ping"):
            assert await status_of(kit, path) == 200
        assert (
            await status_of(kit, "/v1/chat/completions", {"Authorization": f"bearer  {KEY}"}, **CHAT) == 200
        )
        async with kit.http.get(kit.admin + "/metrics") as answer:
            assert answer.status == 200, "the admin port needs no key"
        assert kit.counted("holdfast_bound_refusals_total", "bound") == {("api_key",): 35}


async def test_clients_of_the_messages_api_send_their_key_in_a_header_of_their_own(keys: Path) -> None:
    message = {"model": "m", "max_tokens": 2, "messages": CHAT["messages"]}
    async with frontend(ScriptedWorker(), api_key_file=str(keys)) as kit:
        for path, body in (
            ("/v1/messages", message),
            ("/v1/messages/count_tokens", message),
            ("/v1/chat/completions", CHAT),
        ):
            assert await status_of(kit, path, {"x-api-key": KEY}, **body) == 200
            assert await status_of(kit, path, {"x-api-key": "sk-none"}, **body) == 401
            both = {"x-api-key": KEY, **bearer("sk-none")}
            assert await status_of(kit, path, both, **body) == 401, "Authorization has precedence"
        status, body, _ = await kit.post("/v1/messages", {"x-api-key": "sk-none"}, **message)
        assert (status, body["error"]["type"]) == (401, "authentication_error")


async def test_the_refusal_has_openais_format_and_never_contains_the_key(keys: Path) -> None:
    async with frontend(ScriptedWorker(), api_key_file=str(keys)) as kit:
        status, body, headers = await kit.post("/v1/chat/completions", bearer("sk-wrong-key"), **CHAT)
        error = body["error"]
        assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
        assert headers["WWW-Authenticate"] == "Bearer" and "sk-wrong-key" not in str(body) + str(headers)
        client = openai.AsyncOpenAI(base_url=f"{kit.url}/v1", api_key="sk-wrong-key", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**CHAT)
        right = openai.AsyncOpenAI(base_url=f"{kit.url}/v1", api_key=KEY, max_retries=0)
        assert (await right.chat.completions.create(**CHAT)).choices
        await client.close()
        await right.close()


async def test_the_file_is_reloaded_when_it_changes(keys: Path) -> None:
    """A rotated key is valid within a second; an invalid or missing file is ignored."""
    async with frontend(ScriptedWorker(), api_key_file=str(keys)) as kit:
        replaced(keys, f"fresh:{'sk-third-0123456789'}\n")
        kit.api.openai.check(0.0)
        assert await status_of(kit, "/v1/chat/completions", bearer(KEY), **CHAT) == 401
        assert await status_of(kit, "/v1/chat/completions", bearer("sk-third-0123456789"), **CHAT) == 200
        with structlog.testing.capture_logs() as logs:
            replaced(keys, "name: short\n")
            kit.api.openai.check(0.0)
            keys.unlink()
            kit.api.openai.check(0.0)
        assert [entry["event"] for entry in logs] == ["api_keys_not_read"]
        assert await status_of(kit, "/v1/chat/completions", bearer("sk-third-0123456789"), **CHAT) == 200


async def test_no_key_is_in_logs_facts_metrics_or_settings(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with structlog.testing.capture_logs() as logs:
        async with frontend(ScriptedWorker(), api_key_file=str(keys)) as kit:
            await status_of(kit, "/v1/chat/completions", bearer(KEY), **CHAT)
            await status_of(kit, "/v1/chat/completions", bearer(KEY + "x"), **CHAT)
            replaced(keys, f"one:{OTHER}\n")
            kit.api.openai.check(0.0)
            seen = [str(logs), caplog.text, str(kit.facts), kit.director.render_metrics().decode()]
            seen += [str(kit.director.settings), repr(vars(kit.api.openai.keys))]
    assert not [text for text in seen if "sk-first" in text or "sk-second" in text]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0 keys"),
        ("# none\n", "0 keys"),
        ("short\n", "at least 8 characters"),
        ("a name:sk-0123456789\n", "a name has 1 to 64"),
        ("a:sk-0123456789\na:sk-9876543210\n", "line 2: this name or key is given twice"),
        ("a:sk-0123456789\nb:sk-0123456789\n", "line 2: this name or key is given twice"),
        ("sk-01234 56789\n", "no spaces"),
        ("sk-ö123456789\n", "not ASCII"),
    ],
)
def test_a_file_without_valid_keys_is_refused_with_a_reason_that_quotes_none(
    tmp_path: Path, text: str, why: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(BadSetting, match=why) as raised:
        ApiKeys(path)
    assert "sk-" not in str(raised.value)


def test_keys_without_a_name_are_named_by_their_line(keys: Path) -> None:
    assert [name for name, _ in read_keys(keys)] == ["team-a", "key-4"]


def test_the_name_of_each_key_is_found(keys: Path) -> None:
    found = ApiKeys(keys)
    assert [found.named(f"Bearer {key}") for key in (KEY, OTHER, "no")] == ["team-a", "key-4", ""]


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"host": "127.0.0.1"}, False),
        ({"host": "127.8.9.1"}, False),
        ({"host": "::1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": ""}, True),
        ({"host": "10.0.0.7"}, True),
        ({"host": "no.such.name.invalid"}, True),
        ({"host": "0.0.0.0", "insecure": True}, False),
        ({"host": "0.0.0.0", "api_key_file": "keys"}, False),
    ],
)
def test_other_hosts_are_not_served_without_keys_unless_the_operator_allows_it(
    settings: dict[str, Any], refused: bool
) -> None:
    if refused:
        with pytest.raises(BadSetting, match="--api-key-file"):
            check_open_port(FrontendSettings(**settings))
    else:
        check_open_port(FrontendSettings(**settings))


@pytest.mark.parametrize(
    ("flags", "variables", "why"),
    [
        (["--host", "0.0.0.0"], {}, "--api-key-file"),
        (["--host", "0.0.0.0", "--insecure"], {}, ""),
        (["--host", "0.0.0.0"], {"HOLDFAST_FRONTEND__INSECURE": "true"}, ""),
        (["--host", "0.0.0.0", "--api-key-file", "/nowhere/keys"], {}, "cannot be read"),
        (["--tls-cert", "/nowhere/cert"], {}, "needed together"),
        (["--tls-cert", "/nowhere/cert", "--tls-key", "/nowhere/key"], {}, "is not possible"),
        ([], {}, ""),
    ],
)
def test_up_refuses_bad_settings_before_anything_starts(
    flags: list[str], variables: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(flags)
    if why:
        with pytest.raises(BadSetting, match=why):
            check_front_port(args)
    else:
        check_front_port(args)


# --- TLS


async def with_tls(kit: Kit, folder: Path, name: str = "localhost") -> tuple[Listeners, ssl.SSLContext]:
    """Open a frontend's ports with TLS. Return them with the client's trust store."""
    cert, key = certificate(folder, name)
    listeners = Listeners(
        kit.api, kit.director.settings.model_copy(update={"tls_cert": str(cert), "tls_key": str(key)})
    )
    await listeners.open()
    await listeners.accept()
    return listeners, ssl.create_default_context(cafile=cert)


async def test_the_ports_speak_tls_and_the_fast_path_works_with_it(tmp_path: Path) -> None:
    async with frontend(ScriptedWorker()) as kit:
        listeners, trusted = await with_tls(kit, tmp_path)
        assert listeners.url.startswith("https://") and listeners.admin_url.startswith("https://")
        for stream in (False, True):
            async with kit.http.post(
                f"{listeners.url}/v1/chat/completions", json=CHAT | {"stream": stream}, ssl=trusted
            ) as answer:
                assert answer.status == 200 and await answer.text()
                assert len(listeners.fast_path) == 1, "it was not handed over to aiohttp"
        async with kit.http.get(f"{listeners.url}/v1/models", ssl=trusted) as answer:  # served by aiohttp
            assert answer.status == 200
        async with kit.http.get(f"{listeners.admin_url}/metrics", ssl=trusted) as answer:
            assert answer.status == 200
        with pytest.raises(aiohttp.ClientError):
            await kit.http.get(listeners.url.replace("https", "http") + "/live")
        await kit.http.close()
        await listeners.close()


async def test_a_renewed_certificate_is_used_without_closing_connections(tmp_path: Path) -> None:
    async with frontend(ScriptedWorker()) as kit:
        listeners, trusted = await with_tls(kit, tmp_path)
        port = int(listeners.url.rpartition(":")[2])
        live = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted)
        cert, key = certificate(tmp_path, "renewed")
        os.replace(cert, tmp_path / "localhost.crt")
        listeners.check()  # between the two replacements the files do not match
        os.replace(key, tmp_path / "localhost.key")
        listeners.check()
        writer.write(live)
        async with asyncio.timeout(20):
            assert b" 200 " in await reader.readline()
        renewed = ssl.create_default_context(cafile=tmp_path / "localhost.crt")
        _, second = await asyncio.open_connection("127.0.0.1", port, ssl=renewed)
        assert second.get_extra_info("peercert")["subject"][0][0][1] == "renewed"
        for one in (writer, second):
            one.close()
        await listeners.close()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("missing", "No such file"),
        ("mismatched", "the private key does not belong to the certificate"),
        ("text", "contains no PEM certificate, or the key file no PEM private key"),
        ("swapped", "contains no PEM certificate, or the key file no PEM private key"),
        ("half", "needed together"),
    ],
)
def test_an_unusable_certificate_is_refused_at_startup(tmp_path: Path, wrong: str, why: str) -> None:
    cert, key = certificate(tmp_path)
    other = certificate(tmp_path, "other")[1]
    (text := tmp_path / "text").write_text("no certificate")
    files = {
        "missing": (cert, tmp_path / "none"),
        "mismatched": (cert, other),
        "text": (text, key),
        "swapped": (key, key),
        "half": (cert, ""),
    }[wrong]
    with pytest.raises(Exception, match=why):
        settings = FrontendSettings(tls_cert=str(files[0]), tls_key=str(files[1]))
        Tls(settings.tls_cert, settings.tls_key)
