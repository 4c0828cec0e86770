"""Opt-in (make test-llamacpp): a fleet in front of two real llama-servers, one of which breaks.

A continuation on llama-server consists of text. If no text before the move has an incomplete character (U+FFFD), that text is
exactly the same tokens. Then the answer must equal the undisturbed one to the letter.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import cast

import openai
import pytest
import pytest_asyncio
from llamacpp import LlamaServer
from waits import until

from benchmarks.local_fleet import LocalFleet
from events.decisions import GoldenAgreed
from events.observations import CanaryFailed, GoldenDisputed, RequestMigrated

TOKENS = 400
STREAMS = 8
CANDIDATES = 96
OPENING = 48  # tokens
ROUNDS_MAX = 3
WRONG = {"token_mismatch", "logit_drift", "non_finite"}
UNCLEAR = "\ufffd"

pytestmark = [pytest.mark.llamacpp, pytest.mark.asyncio(loop_scope="module")]

_numbers = itertools.count()


@dataclass
class Stream:
    """One user's request and its result."""

    request: str
    prompt: list[int]
    pieces: list[str] = field(default_factory=list)
    finish: str | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def streams(name: str, prompts: list[list[int]]) -> list[Stream]:
    """Return one request for each prompt."""
    return [Stream(f"{name}-{next(_numbers)}", prompt) for prompt in prompts]


def prompt(salt: int) -> list[int]:
    """Return a prompt of forty token ids."""
    return [300 + (7 * salt + 13 * k) % 1500 for k in range(40)]


async def run(fleet: LocalFleet, stream: Stream, tokens: int = TOKENS) -> Stream:
    """Read one stream to its end with the official client."""
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as api:
        answer = await api.completions.create(
            model="tiny",
            prompt=stream.prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_headers={"X-Request-Id": stream.request},
            extra_body={"ignore_eos": True},
        )
        async for chunk in answer:
            for choice in chunk.choices:
                stream.pieces.append(choice.text)
                reason = cast("str | None", choice.finish_reason)  # only the last one has it
                stream.finish = reason or stream.finish
            if len(stream.pieces) >= 2:
                stream.started.set()
    return stream


async def under(
    fleet: LocalFleet, name: str, prompts: list[list[int]], fault: Callable[[], None]
) -> list[Stream]:
    """Start eight streams, break something once all of them have begun, and return them finished."""
    begun = streams(name, prompts)
    async with asyncio.TaskGroup() as group:
        for stream in begun:
            group.create_task(run(fleet, stream))
        await asyncio.gather(*(stream.started.wait() for stream in begun))
        fault()
    return begun


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(
    llamas: list[LlamaServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalFleet]:
    upstreams = [flag for server in llamas for flag in ("--upstream", server.url)]
    tokenizer = str(llamas[0].made / "tiny")
    flags = ("--engine", "openai", *upstreams, "--model", tokenizer, "--canary-interval", "1")
    one = await LocalFleet.start(tmp_path_factory.mktemp("llamacpp"), *flags).ready()
    yield one
    assert one.stop() == 0, one.log.read_text()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def prompts(fleet: LocalFleet) -> list[list[int]]:
    """Of many prompts, the eight with the most whole characters at the beginning of their answers."""
    await fleet.healthy(2)
    asked = streams("choice", [prompt(salt) for salt in range(CANDIDATES)])
    await asyncio.gather(*(run(fleet, stream, OPENING) for stream in asked))
    asked.sort(key=lambda s: -len("".join(s.pieces).partition(UNCLEAR)[0]))
    return [stream.prompt for stream in asked[:STREAMS]]


async def migrations(fleet: LocalFleet, moved: list[Stream]) -> dict[str, RequestMigrated]:
    """Return the journal's migration events of the moved streams, once they are recorded."""
    ours = {stream.request for stream in moved}

    async def found() -> dict[str, RequestMigrated]:
        facts = [event.fact for event in await fleet.events()]
        return {f.request: f for f in facts if isinstance(f, RequestMigrated) and f.request in ours}

    return await until(found)


async def test_canaries_pass_on_both_servers_with_agreed_goldens(
    fleet: LocalFleet, prompts: list[list[int]]
) -> None:
    # other requests in the batch
    await asyncio.gather(*(run(fleet, stream) for stream in streams("load", prompts)))

    async def agreed() -> bool:
        return len({e.fact.canary for e in await fleet.events() if isinstance(e.fact, GoldenAgreed)}) >= 4

    await until(agreed, 30, every_s=0.2)
    facts = [event.fact for event in await fleet.events()]
    assert not [f for f in facts if isinstance(f, GoldenDisputed)]
    assert not [f for f in facts if isinstance(f, CanaryFailed) and f.reason in WRONG]


@pytest.mark.parametrize("fault", ["kill", "freeze"])
async def test_every_stream_continues_when_a_server_breaks(
    fleet: LocalFleet, llamas: list[LlamaServer], prompts: list[list[int]], fault: str
) -> None:
    await fleet.healthy(2)
    expected = await asyncio.gather(*(run(fleet, stream) for stream in streams("undisturbed", prompts)))
    compared = 0
    for _ in range(ROUNDS_MAX):  # occasionally every answer has an incomplete character before the cut
        got = await under(fleet, fault, prompts, getattr(llamas[0], fault))
        moves = await migrations(fleet, got)
        llamas[0].revive()
        compared = compare(got, expected, moves)
        print(f"\n{fault}: {len(moves)} of {STREAMS} moved, {compared} of these are compared to the letter")
        await fleet.healthy(2)
        if compared:
            return
    pytest.fail("no stream that moved could be compared")


def compare(got: list[Stream], expected: list[Stream], moves: dict[str, RequestMigrated]) -> int:
    """Compare every answer with the undisturbed one; return how many moved ones had to be the same to the letter."""
    assert {(move.exact, move.source) for move in moves.values()} == {(False, "w0")}
    compared = 0
    for stream, whole in zip(got, expected, strict=True):
        assert stream.finish == "length"
        move = moves.get(stream.request)
        if move is None or UNCLEAR not in "".join(whole.pieces[: move.tokens]):
            assert stream.text == whole.text, stream.request
            compared += move is not None
        else:  # the text before the move is kept, and the answer continues
            assert stream.pieces[:2] == whole.pieces[:2]
    return compared


async def test_a_recovered_server_serves_again(fleet: LocalFleet, llamas: list[LlamaServer]) -> None:
    status = await fleet.healthy(2)
    assert {worker["engine"] for worker in status["workers"]} == {"openai"}
    assert all(server.healthy() for server in llamas)
