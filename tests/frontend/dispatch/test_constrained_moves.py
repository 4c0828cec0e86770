"""Constrained answers continue on another worker exactly, as a grammar of what may still follow."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from frontend_kit import TOKENS, Kit, frontend
from real_worker import RealWorker
from scripted_worker import Act, ScriptedWorker, spelling
from simulated_frontend import SHAPE
from waits import until

from events.grammar.constraint import constraint_of
from events.grammar.refusals import TextRejected
from events.observations import MoveRequested, RequestAbandoned, RequestMigrated
from workers.engines.simulated.engine import SimulatedEngine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
        "sky": {"enum": ["clear", "überzogen", "曇り"]},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["city", "days", "sky", "inner"],
    "additionalProperties": False,
    "$defs": {"inner": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"inner": {"$ref": "#/$defs/inner"}}}]}},
}  # fmt: skip
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    },
    "json object": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": r"[A-Z]{3}-\d{8}( (é|日本|🏔){6})?"}},
    "choice": {
        "structured_outputs": {"choice": ["the first of two long choices", "the second of two long choices"]}
    },
    "grammar": {
        "structured_outputs": {"grammar": 'root ::= item{9}\nitem ::= "(" item ")" | "日本" | [a-c]'}
    },
    "guided": {"guided_regex": "(ab|cd){12}"},
}
EOS = 2
ASKED: dict[str, Any] = {"model": "m", "prompt": "Describe the weather.", "max_tokens": 400, "seed": 7}


@asynccontextmanager
async def two_workers() -> AsyncIterator[tuple[Kit, list[RealWorker]]]:
    async with frontend() as kit:
        workers = []
        for name in ("w1", "w2"):
            worker = await RealWorker(name, SimulatedEngine(SHAPE)).start()
            await kit.add(worker, **worker.facts)  # type: ignore[arg-type]
            workers.append(worker)
        yield kit, workers


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", CONSTRAINTS)
async def test_an_answer_obeys_its_constraint(kind: str, temperature: float) -> None:
    async with two_workers() as (kit, _):
        status, answer, _ = await kit.post(
            "/v1/completions", **ASKED, temperature=temperature, **CONSTRAINTS[kind]
        )
    assert status == 200, answer
    (choice,) = answer["choices"]
    grammar = constraint_of(CONSTRAINTS[kind])
    grammar.rest(choice["text"])  # raises TextRejected if no text of the grammar begins so
    assert choice["finish_reason"] == "stop"
    if "json" in kind:
        json.loads(choice["text"])
    with pytest.raises(TextRejected):
        grammar.rest(choice["text"] + "\x00")


async def text_of(kit: Kit, kind: str) -> str:
    """Return the text of a streamed answer."""
    body = ASKED | {"stream": True} | CONSTRAINTS[kind]
    texts = []
    async with kit.http.post(kit.url + "/v1/completions", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                texts.append(event["choices"][0]["text"])
    return "".join(texts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONSTRAINTS)
async def test_an_answer_that_loses_its_worker_ends_as_without_the_loss(kind: str) -> None:
    async with two_workers() as (kit, _):
        expected = await text_of(kit, kind)
    for cut in (1, 2, 3, 5, 8, 13):
        async with two_workers() as (kit, workers):
            for worker in workers:
                worker.cut_after = cut
            answering = asyncio.create_task(text_of(kit, kind))
            dues = [asyncio.create_task(worker.due.wait()) for worker in workers]
            await asyncio.wait([answering, *dues], return_when=asyncio.FIRST_COMPLETED)
            reached = [worker for worker, due in zip(workers, dues, strict=True) if due.done()]
            for due in dues:
                due.cancel()
            if reached:
                await reached[0].stop()
            for worker in workers:
                worker.cut_after = None
            assert await answering == expected, (kind, cut)


async def test_a_planned_move_continues_the_grammar() -> None:
    async with two_workers() as (kit, _):
        expected = await text_of(kit, "json schema")
    async with two_workers() as (kit, workers):
        workers[0].cut_after = workers[1].cut_after = 4
        answering = asyncio.create_task(text_of(kit, "json schema"))
        await until(lambda: any(worker.due.is_set() for worker in workers))
        (source,) = (worker for worker in workers if worker.due.is_set())
        (target,) = (worker for worker in workers if worker is not source)
        kit.tell(MoveRequested(worker=source.name, instance=source.instance, to=target.name, by="test"))
        assert await answering == expected
        moved = [request for request in target.requests if len(request.tokens) > request.prompt_tokens]
        assert moved and moved[0].guided_fallback is None
        assert [fact.method for fact in kit.said(RequestMigrated)] == ["reprefill"]


BROKEN_CHARACTERS = "a日本🏔z"  # one token for each byte


@pytest.mark.parametrize("broken_after", range(1, 12))
async def test_an_answer_that_breaks_inside_a_character_continues_before_it(broken_after: int) -> None:
    tokens = [*TOKENS.encode(BROKEN_CHARACTERS, special=False), EOS]
    workers = [ScriptedWorker(name, follow=spelling(tokens), stop_at=EOS) for name in ("w1", "w2")]
    workers[0].acts.append(Act(after=broken_after, how="disconnect"))
    workers[1].acts.append(Act(after=broken_after, how="disconnect"))
    async with frontend(*workers) as kit:
        events = await kit.stream(model="m", prompt="once", max_tokens=40, guided_regex=".+")
        continued = [one for worker in workers for one in worker.requests if one.guided_fallback is None]
    assert "".join(event["choices"][0]["text"] for event in events if "choices" in event) == BROKEN_CHARACTERS
    for request in continued:
        accepted = request.tokens[request.prompt_tokens :]
        text = b"".join(map(TOKENS.bytes_of, accepted)).decode()  # raises an error inside a character
        rest = constraint_of({"guided_regex": ".+"}).rest(text)
        assert text and request.guided == {"structured_outputs": {"grammar": rest}}


async def test_an_answer_with_its_token_ids_does_not_continue_inside_a_character() -> None:
    """Its client has a part of the character."""
    tokens = [*TOKENS.encode(BROKEN_CHARACTERS, special=False), EOS]
    workers = [ScriptedWorker(name, follow=spelling(tokens), stop_at=EOS) for name in ("w1", "w2")]
    for worker in workers:
        worker.acts.append(Act(after=3, how="disconnect"))
    async with frontend(*workers) as kit:
        events = await kit.stream(
            model="m", prompt="once", max_tokens=40, guided_regex=".+", return_token_ids=True
        )
        assert events[-1]["error"]["code"] == "disconnected"
        assert [fact.reason for fact in kit.said(RequestAbandoned)] == ["guided_decoding"]
