"""Runs vLLM servers, and a fleet in front of them."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from probe import Server
from vllm_servers import VllmServer, folder

from benchmarks.local_fleet import LocalFleet

READY_WITHIN_S = 120.0


class Fronted(NamedTuple):
    """A server, and a fleet in front of it and further servers of the same model."""

    direct: Server
    through: Server
    servers: list[VllmServer]
    fleet: LocalFleet


@contextlib.contextmanager
def fronted(logs: Path, model: Path, servers: int, flags: Sequence[str], *more: str) -> Iterator[Fronted]:
    """Run servers with these flags, and a fleet in front of them. `more` are flags of the fleet."""
    made = folder()
    assert made is not None
    running = VllmServer.start(made, [logs / f"{n}.log" for n in range(servers)], model, flags=flags)
    try:
        upstreams = itertools.chain.from_iterable(("--upstream", server.url) for server in running)
        own = ("--engine", "openai", "--model", str(model), *upstreams, *more)
        fleet = asyncio.run(LocalFleet.start(logs / "fleet", *own).ready())
        try:
            asyncio.run(fleet.healthy(servers, READY_WITHIN_S))
            yield Fronted(Server(running[0].url), Server(fleet.url), running, fleet)
        finally:
            assert fleet.stop() == 0, fleet.log.read_text()
    finally:
        for server in running:
            server.kill()
