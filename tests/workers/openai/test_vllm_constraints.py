"""Opt-in (make test-vllm): constrained answers of vLLM servers continue exactly from any cut.

The other server gets the prompt, the accepted tokens, and the grammar of what may still follow.
"""

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from engine_contract import Rig
from vllm_servers import VllmServer

from controller.frontend.openai.text.tokenizer import Tokens, load_tokens
from events.grammar.constraint import Constraint, constraint_of
from events.wire import Generate, Sampling
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", "日本"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "person": {"structured_outputs": {"json": PERSON}},
    "tree": {"structured_outputs": {"json": TREE}},
    "any object": {"structured_outputs": {"json_object": True}},
    "pattern": {"structured_outputs": {"json": {"type": "string", "pattern": "^[a-z]{4}(é|ü){2}-[0-9]{3}$"}}},
    "numbers": {
        "structured_outputs": {"json": {"type": "array", "items": {"type": "number"}, "minItems": 4}}
    },
    "regex": {"structured_outputs": {"regex": r"(yes|no), [A-Z][a-z]{3,9} (日本|🏔|é){3} [0-9]{4}"}},
    "choice": {"structured_outputs": {"choice": ["the first one, 日本", "the second one, 🏔🏔"]}},
    "grammar": {
        "structured_outputs": {"grammar": 'root ::= item+ "."\nitem ::= "(" item ")" | [a-f]{2,4} | "日"'}
    },
}
PROMPTS = [[300 + (11 * k + seed) % 1500 for k in range(24)] for seed in (0, 401, 873)]
TOKENS = 40
CUTS_MIN = 300

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rigs(vllms: list[VllmServer]) -> AsyncIterator[list[Rig]]:
    """An engine for each server."""
    made = [Rig(OpenAIEngine(UpstreamSettings(url=server.url))) for server in vllms]
    for rig in made:
        await rig.start()
    yield made
    for rig in made:
        await rig.engine.stop()


async def direct(server: VllmServer, prompt: list[int], fields: dict[str, Any]) -> list[int]:
    """Return the tokens of a server's own answer to a client."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    async with (
        aiohttp.ClientSession() as http,
        http.post(server.url + "/v1/completions", json=body | fields) as answer,
    ):
        said = await answer.json()
        assert answer.status == 200, said
        tokens: list[int] = said["choices"][0]["token_ids"]
        return tokens


async def continued(rig: Rig, prompt: list[int], accepted: list[int], grammar: str) -> list[int]:
    """Return the tokens with which a server continues an answer."""
    key = rig.key()
    sampling = Sampling(max_tokens=TOKENS - len(accepted))
    guided: dict[str, object] = {"structured_outputs": {"grammar": grammar}}
    rig.engine.submit(key, Generate(key, f"r{key}", prompt + accepted, len(prompt), sampling, guided=guided))
    answer = await rig.answer(key)
    assert answer.error is None, answer.error
    return list(answer.tokens)


async def every_cut(
    rig: Rig, tokens: Tokens, constraint: Constraint, prompt: list[int], answer: list[int]
) -> list[float]:
    """Continue an answer from each of its tokens, and compare. Return how long each grammar took to compute, in ms."""
    took, running = [], []
    for cut in range(1, len(answer)):
        began = time.perf_counter()
        whole = tokens.whole_characters(answer[:cut])
        rest = constraint.rest(tokens.answer_text(prompt, answer[:whole]))
        took.append((time.perf_counter() - began) * 1000)
        running.append((whole, asyncio.create_task(continued(rig, prompt, answer[:whole], rest))))
    for whole, task in running:
        assert await task == answer[whole:], (whole, tokens.decode(answer[:whole]))
    return took


async def test_every_cut_of_a_constrained_answer_continues_exactly(
    rigs: list[Rig], vllms: list[VllmServer]
) -> None:
    tokens, took = load_tokens(str(vllms[0].model)), list[float]()
    for fields in CONSTRAINTS.values():
        constraint = constraint_of(fields)
        for prompt in PROMPTS:
            answer = await direct(vllms[0], prompt, fields)
            # sent as a grammar from the first token on, the constraint changes nothing
            assert await continued(rigs[0], prompt, [], constraint.ebnf) == answer
            took += await every_cut(rigs[1], tokens, constraint, prompt, answer)
    assert len(took) >= CUTS_MIN
    p50, p99 = statistics.median(took), statistics.quantiles(took, n=100)[98]
    print(json.dumps({"cuts": len(took), "altered": 0, "ms_p50": round(p50, 2), "ms_p99": round(p99, 2)}))
