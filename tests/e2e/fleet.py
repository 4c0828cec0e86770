"""The commands that the end-to-end tests run."""

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import first_database
import openai
from typed_commands import run_command

from benchmarks.local_fleet import LocalFleet
from controller.frontend.openai.text.tokenizer import BUILTIN, load_tokens
from workers.engines.simulated.language import as_bytes, open_sequence, plain_token


@asynccontextmanager
async def running(
    data: Path, *flags: str, environment: dict[str, str] | None = None, stops: bool = False
) -> AsyncIterator[LocalFleet]:
    """A ready fleet with a prepared database. It is ended after any test; with `stops`, gracefully after a successful one."""
    first_database.lay_in_fleet(data)
    planner = () if "--planner-mode" in flags else ("--planner-mode", "off")  # one process less to wait for
    fleet = await LocalFleet.start(data, *flags, *planner, environment=environment).ready()
    try:
        yield fleet
        if stops and fleet.process.poll() is None:
            assert fleet.stop() == 0, fleet.last_words()
    finally:
        fleet.end()


def holdfast(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return run_command(arguments, {**os.environ, **(environment or {})})


def undisturbed(prompt: Sequence[int], tokens: int) -> str:
    """Return any simulated worker's answer of this length in tokens to a prompt."""
    running, said = open_sequence("sim", prompt), []
    for _ in range(tokens):
        said.append(plain_token(running.intdigest()))
        running.update(as_bytes(said[-1:]))
    return load_tokens(BUILTIN).decode(said)


async def streamed(fleet: LocalFleet, prompt: Sequence[int], tokens: int) -> str:
    """Read one streamed answer to its end."""
    text = ""
    async with client(fleet) as api:
        stream = await api.completions.create(
            model="sim", prompt=list(prompt), max_tokens=tokens, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            text += chunk.choices[0].text if chunk.choices else ""
    return text


def files_holding(place: Path, *words: str) -> list[str]:
    """Return the files below a folder that contain any of some texts. A process that ends meanwhile removes its files."""
    found = []
    for path in place.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            content = path.read_bytes() if path.is_file() else b""
            if any(one.encode() in content for one in words):
                found.append(str(path.relative_to(place)))
    return found


def client(fleet: LocalFleet) -> openai.AsyncOpenAI:
    """Return the official client without retries: failures must be visible."""
    return openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=60)
