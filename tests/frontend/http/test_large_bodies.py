"""Large bodies are parsed outside the event loop, in bounded steps and killable processes."""

import asyncio
import contextlib
import io
import json
import os
import random
import signal
from typing import Any

import psutil
import pytest
from frontend_kit import frontend
from scripted_worker import ScriptedWorker
from waits import turns, until

from controller.frontend.errors import ApiError
from controller.frontend.openai.intake import CHEAP_BYTES, COMMAND, SLICE_BYTES, YIELD_BYTES, BodyScan, Intake
from controller.frontend.openai.request_kinds import parse_body
from controller.frontend.settings import AdmissionSettings, FrontendSettings

REFUSED = "holdfast_bound_refusals_total"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
BIG = {"role": "user", "content": "x" * 50}


def parsers() -> list[psutil.Process]:
    """Return the parser processes of this test process."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if COMMAND[-1] in process.cmdline():
                found.append(process)
    return found


def bodies(dice: random.Random) -> dict[str, bytes]:
    """Return a mix of bodies: ordinary ones, and ones that are expensive to decode."""
    count = dice.randrange(1000, 200_000)
    names = b"".join(b',"a%d":1' % n for n in range(count))
    return {
        "names": b'{"model":"m"' + names + b"}",
        "lists": b'{"prompt":[' + b"[]," * count + b"0]}",
        "objects": b'{"messages":[' + b'{"role":"user"},' * count + b"0]}",
        "texts": b'{"stop":[' + b'"",' * count + b'""]}',
        "numbers": b'{"prompt":[' + b"1," * count + b"0]}",
        "escapes": b'{"prompt":"' + b"\\n" * count + b'"}',
        "text": b'{"prompt":"' + b"x" * count + b'"}',
        "no json": bytes(dice.choices(b'[]{}",:\\1a', k=count)),
        "usual": json.dumps(CHAT).encode(),
    }


@pytest.mark.slow
async def test_other_tasks_run_every_64_kib_whatever_a_body_contains() -> None:
    """Over 1,000 seeded bodies, at most 64 KiB and a slice are scanned between two turns of the event loop.

    Only bodies within the limits of cheap ones are decoded on the event loop.
    """
    dice, taken = random.Random(18), 0

    async def others() -> None:
        nonlocal taken
        while True:
            taken += 1
            await turns()

    intake = Intake(FrontendSettings())
    task = asyncio.create_task(others())
    mixes = [bodies(dice) for _ in range(12)]
    for _ in range(1000):
        body = dice.choice(list(dice.choice(mixes).values()))
        scan, excess, before = BodyScan(AdmissionSettings()), "", taken
        for at in range(0, len(body), SLICE_BYTES):
            if excess := scan.feed(body[at : at + SLICE_BYTES]):
                break
        try:
            found = BodyScan(AdmissionSettings())
            await intake.scan(found, body)
        except ApiError as error:
            assert excess and str(error).endswith(excess)
        else:
            assert not excess and (not found.cheap or len(body) <= CHEAP_BYTES)
        assert taken - before >= (scan.size - 1) // (YIELD_BYTES + SLICE_BYTES)
    task.cancel()


async def test_a_body_is_refused_while_it_arrives() -> None:
    """The response is sent with the part that exceeds the limit; the rest of the body is not awaited."""
    async with frontend(ScriptedWorker()) as kit:
        port = int(kit.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        names = b"".join(b',"a%d":1' % n for n in range(70_000))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 40000000\r\n\r\n")
        writer.write(b'{"model":"m"' + names)
        async with asyncio.timeout(20):
            assert b" 400 " in await reader.readline()
            assert b"at most 65536 names" in await reader.readuntil(b"}}")
        writer.close()
        assert kit.counted(REFUSED, "bound") == {("body_values",): 1}


@pytest.mark.parametrize("count", [10, 3000])
async def test_a_chat_of_many_messages_is_parsed_the_same_in_a_process(count: int) -> None:
    async with frontend(ScriptedWorker()) as kit:
        body: dict[str, Any] = {
            **CHAT,
            "messages": [{"role": "user", "content": "a"}] * count,
            "max_tokens": 4,
            "n": 1,
        }
        status, answer, _ = await kit.post("/v1/chat/completions", **body)
        assert len(parsers()) == (count > 1000)
        assert (status, answer.get("error", {}).get("code")) in (
            (200, None),
            (400, "context_length_exceeded"),
        )
    await until(lambda: not parsers())


async def test_an_invalid_large_body_is_refused_like_a_small_one() -> None:
    async with frontend(ScriptedWorker()) as kit:
        for more, code, param in (
            ({"temperature": 9}, "invalid_value", "temperature"),
            ({"best_of": 3}, "unsupported_parameter", "best_of"),
            ({"seed": 10**30}, "invalid_value", "seed"),
        ):
            body: dict[str, Any] = {**CHAT, "messages": [BIG] * 2000, **more}
            status, answer, _ = await kit.post("/v1/chat/completions", **body)
            error = answer["error"]
            assert (status, error["code"], error["param"]) == (400, code, param)
        async with kit.http.post(kit.url + "/v1/completions", data=io.BytesIO(b"[1," * 600_000)) as answer:
            assert answer.status == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "chat_completions",
        "completions",
        "messages",
        "count_tokens",
        "responses",
        "tokenize",
        "detokenize",
        "json",
    ],
)
async def test_every_parser_returns_the_same_in_both_places(name: str) -> None:
    """The parsed request does not depend on where it is parsed."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "é"}], "more": {"a": [1, None, 2.5]}}
    ] * 1500
    body = {
        "chat_completions": {
            "model": "m",
            "messages": messages,
            "logit_bias": {"5": 1},
            "odd": 1,
            "stop": ["a"],
        },
        "completions": {"model": "m", "prompt": list(range(40_000)), "echo": True},
        "messages": {"model": "m", "messages": messages, "max_tokens": 5, "thinking": {"type": "enabled"}},
        "count_tokens": {"model": "m", "messages": messages},
        "responses": {
            "model": "m",
            "input": [{"role": "user", "content": "é"}, {"type": "item_reference", "id": "x"}] * 1500,
            "instructions": "i" * 200_000,
            "reasoning": {"effort": "low"},
        },
        "tokenize": {"messages": messages, "chat_template_kwargs": {"a": 1}},
        "detokenize": {"tokens": list(range(40_000))},
        "json": messages,
    }[name]
    encoded = json.dumps(body).encode()
    intake = Intake(FrontendSettings())
    try:
        assert await intake.parsed(name, encoded) == parse_body(name, encoded)
        assert parsers()
    finally:
        await intake.close()


@pytest.mark.slow
async def test_a_dead_parser_is_replaced_and_a_slow_one_is_killed() -> None:
    body = json.dumps({"model": "m", "prompt": list(range(40_000))}).encode()
    intake = Intake(FrontendSettings(admission={"body_parse_s": 20.0}))
    hurried = Intake(FrontendSettings(admission={"body_parse_s": 0.01}))
    try:
        await intake.parsed("completions", body)
        for pause_s in (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01):  # its pipes close one after another
            (process,) = parsers()
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.sleep(pause_s)  # at which moment after its death it is used
            assert (await intake.parsed("completions", body)).model == "m"
            assert parsers() != [process]
        process = intake._parsers._processes[0]._process
        assert process is not None and process.stdin is not None
        # as uvloop closes it if the process has died and has not been waited for
        process.stdin.transport.close()
        assert (await intake.parsed("completions", body)).model == "m"
        with pytest.raises(Exception, match=r"not parsed within 0\.01 s"):
            await hurried.parsed("completions", body)
        await until(lambda: len(parsers()) == 1)
    finally:
        await intake.close()
        await hurried.close()


@pytest.mark.slow
async def test_a_client_that_disconnects_does_not_stop_the_parser() -> None:
    body = json.dumps({"model": "m", "prompt": list(range(400_000))}).encode()
    intake = Intake(FrontendSettings())
    try:
        await intake.parsed("completions", body)
        (first,) = parsers()
        task = asyncio.create_task(intake.parsed("completions", body))
        await turns(100)  # it is scanned and sent to the process
        assert not task.done()
        task.cancel()
        assert (await intake.parsed("completions", body)).model == "m"
        assert parsers() == [first]
    finally:
        await intake.close()
