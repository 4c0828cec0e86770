"""Sampling parameters left out by a client have the model's defaults.

These are the server's, or those of the model's folder.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from frontend_kit import frontend
from scripted_worker import Act, ScriptedWorker

from controller.frontend.openai.request_kinds import parse_body
from controller.frontend.openai.request_parser import DEFAULTED, read_chat
from controller.frontend.openai.text.tokenizer import read_defaults
from events.observations import RequestMigrated
from events.token_bytes import BUILTIN_FILE
from events.wire import Beat, Load, Sampling

PROMPT = [300, 301, 302]
ALL_GIVEN = {
    "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0,
    "repetition_penalty": 1,
}  # fmt: skip
CONFIG = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def folder(path: Path, config: Any) -> Path:
    """Return a model's folder with this generation config."""
    path.mkdir()
    shutil.copy(BUILTIN_FILE, path / "tokenizer.json")
    (path / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, DEFAULTED),
        ({"temperature": 1.0, "top_p": 1.0}, DEFAULTED[2:]),
        ({"temperature": 0}, DEFAULTED[1:]),
        ({"top_p": 0.5}, (DEFAULTED[0], *DEFAULTED[2:])),
        (dict.fromkeys(DEFAULTED, 1), ()),
        ({"temperature": None}, DEFAULTED),
    ],
)
def test_a_request_records_what_its_client_left_out(given: dict[str, Any], left: tuple[str, ...]) -> None:
    """A value equal to the default still counts as given. The fast path for plain chats agrees with the other one."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **given}
    assert read_chat(json.dumps(chat).encode()).sampling.unset == list(left)
    assert read_chat(json.dumps(chat | {"user": "u"}).encode()).sampling.unset == list(left)
    plain = {"model": "m", "prompt": "hi", **given}
    assert parse_body("completions", json.dumps(plain).encode()).sampling.unset == list(left)


async def test_an_upstreams_worker_receives_the_fields_left_out() -> None:
    """It gets no seed of ours: another server's random numbers restart after a migration in any case."""
    worker = ScriptedWorker("w1")
    async with frontend() as kit:
        await kit.add(worker, engine="openai")
        await kit.complete(PROMPT, 2)
        await kit.complete(PROMPT, 2, temperature=0.5, seed=7)
        first, second = (request.sampling for request in worker.requests)
        assert (first.unset, first.seed) == (list(DEFAULTED), None)
        assert (second.unset, second.seed, second.temperature) == (list(DEFAULTED[1:]), 7, 0.5)


async def test_our_own_engines_use_the_folders_generation_config(tmp_path: Path) -> None:
    """The client's values have precedence, also if they equal the default."""
    worker = ScriptedWorker("w1")
    async with frontend() as kit:
        await kit.add(worker, tokenizer=str(folder(tmp_path / "m", CONFIG)))
        await kit.complete(PROMPT, 2)
        await kit.complete(PROMPT, 2, temperature=1.0, top_k=0)
        first, second = (request.sampling for request in worker.requests)
        assert (first.temperature, first.top_p, first.top_k, first.repetition_penalty) == (0.6, 0.8, 20, 1.05)
        assert (second.temperature, second.top_p, second.top_k) == (1.0, 0.8, 0)
        assert first.unset == second.unset == []
        assert first.seed is not None


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (CONFIG, CONFIG),
        ({"temperature": 9, "top_p": "x", "top_k": -1, "min_p": True}, {"top_k": 0}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ("no json", {}),
        ([1], {}),
    ],
)
def test_a_generation_config_is_read_within_bounds(tmp_path: Path, config: Any, found: Any) -> None:
    """A value that no client could give is ignored, and a broken file does not stop the frontend."""
    assert read_defaults(folder(tmp_path / "m", config)) == found
    assert read_defaults(tmp_path) == read_defaults(None) == {}


@pytest.mark.parametrize(
    ("one", "other", "given", "exact"),
    [
        ({"root": "a"}, {"root": "a"}, {}, True),
        ({"root": "a"}, {"root": "b"}, {}, False),
        ({"root": "a"}, {}, ALL_GIVEN, False),
        ({"generation_config": "1"}, {"generation_config": "2"}, {}, False),
        ({"generation_config": "1"}, {"generation_config": "1"}, {}, False),  # a digest of our folder only
        ({}, {}, {}, False),
        ({}, {}, ALL_GIVEN, True),
    ],
)
async def test_a_move_is_exact_only_between_equal_models(
    one: dict[str, str], other: dict[str, str], given: dict[str, float], exact: bool
) -> None:
    """Other weights, or other defaults for what the client left out, continue a different answer.

    If neither server names its weights, its defaults are unknown.
    """
    first = ScriptedWorker("w1", always=Act(2, "disconnect"))
    second = ScriptedWorker("w2")
    async with frontend() as kit:
        await kit.add(first, engine="openai", **one)
        await kit.add(second, engine="openai", **other)
        kit.director.table.endpoints["w2", "i1"].begin()
        await kit.complete(PROMPT, 6, **({"temperature": 0} | given))
        (moved,) = kit.said(RequestMigrated)
        assert moved.exact is exact


def test_workers_and_frontends_of_0_2_0_read_the_longer_frames() -> None:
    """Readers ignore unknown fields at the end of a frame's arrays, and use defaults if senders omit them."""
    for longer, added in ((Sampling(max_tokens=3, unset=["top_p"]), 1), (Load(running=2, closed_s=3.0), 1)):
        names = type(longer).__struct_fields__
        fields = [(name, Any) for name in names[:-added]]
        older = msgspec.defstruct("Older", fields, array_like=True)
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(longer), type=older)
        assert [getattr(read, name) for name, _ in fields] == [getattr(longer, name) for name, _ in fields]
        back = msgspec.msgpack.decode(msgspec.msgpack.encode(read), type=type(longer))
        usual = Sampling(0) if isinstance(longer, Sampling) else Load()
        assert getattr(back, names[-1]) == getattr(usual, names[-1])
    assert Beat("idle", 0.0).load.closed_s == 0.0
