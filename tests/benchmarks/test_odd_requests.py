"""Odd requests depend on seed and number alone, and answers are judged: a 500, a hang, a silence."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.attack.fuzz import STATUS, Address, Told, came_through, judged, tell, tell_all
from benchmarks.attack.odd_requests import ROUND, Odd, fields, odd_request
from controller.demo.fleet import NotAsExpected

GOOD = b'HTTP/1.1 200 OK\r\nContent-Length: 33\r\n\r\n{"choices": [{"text": "as ever"}]}'
REFUSED = b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": {"code": "invalid_value"}}'
ODD = Odd(417, "value", "ChatBody.seed", b"POST /odd HTTP/1.1\r\n\r\n")

Answers = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(answers: Answers) -> AsyncIterator[Address]:
    """A server that reads the head of a request and answers by `answers`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answers(await reader.readuntil(b"\r\n\r\n"), writer)
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()
        yield host, port


def answering(odd: bytes, honest: bytes = GOOD) -> Answers:
    async def answers(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(odd if b"/odd" in head else honest)

    return answers


def test_a_request_depends_on_seed_and_number_and_all_differ() -> None:
    made = [odd_request(3, number) for number in range(60)]
    assert made == [odd_request(3, number) for number in range(60)]
    assert odd_request(3, 41) == made[41] and odd_request(4, 41) != made[41]
    assert [odd.kind for odd in made] == list(ROUND) * 6
    assert len({odd.said for odd in made}) > 50


def test_every_field_of_the_api_has_its_turn() -> None:
    rounds = -(-len(fields()) // ROUND.count("value"))
    tried = [odd_request(1, number) for number in range(rounds * len(ROUND))]
    assert {odd.about for odd in tried if odd.kind == "value"} == {
        f"{name}.{field}" for name, field in fields()
    }
    assert len(fields()) > 200


@pytest.mark.parametrize(
    ("got", "wrong"),
    [
        (REFUSED, ""),
        (GOOD, ""),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", ""),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", "answered with 500"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "answered with 502"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 504 Gateway Timeout\r\n\r\n", "answered with 504"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"code": "internal"}}\n\n', "answered with internal"),
        (
            b'HTTP/1.1 422 X\r\n\r\n{"error": {"code": "request_poisonous"}}',
            "answered with request_poisonous",
        ),
        (b"", "closed without an answer"),
    ],
)
def test_an_answer_is_judged_by_its_status_and_its_code(got: bytes, wrong: str) -> None:
    assert judged(ODD, got, Told()).partition(":")[0] == wrong


def test_a_request_that_is_no_http_may_be_closed_without_an_answer() -> None:
    assert judged(Odd(1, "head", "garbage", b"\0", whole=False), b"", Told()) == ""


async def test_a_hanging_request_is_found() -> None:
    async def hangs(head: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()  # the fault: no answer in time

    told = Told()
    async with server(hangs) as address:
        await tell(address, ODD, told, within_s=0.1)
    assert told.wrong == ["417 (value, ChatBody.seed) no end within 0.1 s"]


async def test_a_refused_connection_is_found() -> None:
    async with server(answering(REFUSED)) as address:
        pass
    told = Told()
    await tell(address, ODD, told)
    assert "no connection" in told.wrong[0]


async def test_all_are_sent_beside_an_honest_client_and_its_answers_are_compared() -> None:
    async with server(answering(REFUSED)) as address:
        told = await tell_all(address, [ODD] * 20, 4)
    assert (told.kinds["value"], told.wrong, told.honest_wrong) == (20, [], [])
    assert told.honest >= 1 and told.statuses == {"400": 20} and told.codes == {"invalid_value": 20}

    asked = 0

    async def altering(head: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += b"/odd" not in head
        writer.write(REFUSED if b"/odd" in head else GOOD if asked == 1 else GOOD.replace(b"ever", b"x"))

    async with server(altering) as address:
        told = await tell_all(address, [ODD], 1)
    assert told.honest_wrong == ["as x"] * told.honest

    async with server(answering(REFUSED, honest=REFUSED)) as address:
        with pytest.raises(NotAsExpected, match="an honest request was not answered"):
            await tell_all(address, [ODD], 1)


def test_a_fleet_comes_through_only_if_nothing_was_wrong() -> None:
    well = {
        "wrong": [],
        "honest": 3,
        "honest_wrong": [],
        "restarted": [],
        "blamed_on_workers": 0,
        "well_afterwards": True,
    }
    assert came_through(well)
    for worse in (
        {"wrong": ["417 …"]},
        {"honest_wrong": ["x"]},
        {"honest": 0},
        {"restarted": ["holdfast worker"]},
        {"blamed_on_workers": 1},
        {"well_afterwards": False},
    ):
        assert not came_through(well | worse), worse


def test_a_status_is_found_wherever_an_answer_begins() -> None:
    assert STATUS.findall(b"HTTP/1.0 408 Request Timeout\r\n\r\n") == [b"408"]
