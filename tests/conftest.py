"""Real servers for the tests: on random ports, in directories of their own."""

import asyncio
import gc
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import first_database
import hypothesis
import pytest
import structlog
from xdist.scheduler import LoadScopeScheduling

from controller.adapters.embedded.servers import EmbeddedServer, start_nats, start_postgres
from events.journal import broker
from events.nats import connection

TOGETHER = (  # on one tester: they share a fleet, what was parsed, or another fixture of their module
    *("test_operating.py", "test_survival.py", "test_up.py", "test_upstream_faults.py"),
    *("test_house.py", "test_kv_feed.py"),
    *("test_replay_cli.py", "test_trace_chat.py", "test_trace_synthesis.py"),
)
Condition = Callable[[], object | Awaitable[object]]
Eventually = Callable[..., Awaitable[None]]
POLL_S = 0.005
POLL_S_MAX = 0.02  # after 0.2 s: to look may be most of the work
# No test trusts anybody's certificate, and each of hundreds of processes would read all that this machine trusts (45 ms).
os.environ.setdefault("SSL_CERT_FILE", str(Path(__file__).with_name("no_authority.pem")))
# What rich makes of a traceback, with the sources and all variables in colours, costs 100 ms and nobody reads it.
structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback
# A busy machine may keep a server waiting for seconds: who means to find one away says how long he waits.
connection.CONNECT_TIMEOUT_S = broker.API_DEADLINE_S = 10
# These take a core for ten seconds each; most others wait for servers. Spread among them, they use the time for which those wait.
COMPUTING = ("test_every_invariant_holds_in_", "test_mypy_finds_nothing")
T = TypeVar("T")

hypothesis.settings.register_profile(
    "any machine",  # one that is busy takes its time over an example, and nothing is wrong
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any machine")


class OneByOne(LoadScopeScheduling):  # type: ignore[misc]  # xdist publishes no types
    """Hands tests out one after another. Those that share something go to one tester, so that it is made once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        shared = file.endswith(TOGETHER)
        return f"{file} {'behind the broker' in nodeid}" if shared else nodeid


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let transcripts be recorded anew: see `frontend/request/test_request_transcripts.py`."""
    parser.addoption(
        "--rewrite-transcripts", action="store_true", help="record the effects in all transcripts anew"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Have each tester collect all tests from another file on, for none to prepare files (once) that others are preparing."""
    own = getattr(config, "workerinput", None)
    if own and config.args == config.getini("testpaths"):
        files = [str(file) for file in sorted(Path(__file__).parent.rglob("test_*.py"))]
        first = int(own["workerid"].removeprefix("gw")) * len(files) // own["workercount"]
        config.args = files[first:] + files[:first]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring what was collected into the order that all testers share. Many files' tests all wait, or all compute: they are
    mixed, and what computes for long lies evenly among the rest.
    """
    items.sort(key=lambda item: crc32(item.nodeid.encode()))
    computing = [item for item in items if item.name.startswith(COMPUTING)]
    rest = [item for item in items if not item.name.startswith(COMPUTING)]
    every = max(1, len(rest) // (len(computing) + 1))
    for place, item in enumerate(computing, 1):
        rest.insert(place * (every + 1) - 1, item)
    items[:] = rest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is collected, half a million objects, out of every later search for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneByOne | None:
    """Let `make test` hand its tests out so; who names another way (--dist) gets that."""
    return OneByOne(config, log) if config.getvalue("dist") == "loadgroup" else None


class Background:
    """A thread with a loop of its own, for the session: servers die with the thread that started them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there, whether or not a loop runs here, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """What a test, or a command that it runs in this process, sets up about logs and the rights of new files ends with it."""
    mask = os.umask(0o022)
    yield
    os.umask(mask)
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def background() -> Iterator[Background]:
    """A place to run coroutines from fixtures that are not async themselves."""
    made = Background()
    yield made
    made.close()


@pytest.fixture(scope="session")
def nats_server(background: Background, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A nats-server with JetStream for the whole session, for tests that leave nothing behind. Others want `nats_url`."""
    server = background.run(start_nats(tmp_path_factory.mktemp("nats")))
    yield server
    background.run(server.kill())


@pytest.fixture
def own_nats(background: Background, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A nats-server of the test's own in tmp_path/nats, to kill and restart (30 ms)."""
    server = background.run(start_nats(tmp_path / "nats", monitor=0))
    yield server
    background.run(server.kill())


@pytest.fixture
def nats_url(own_nats: EmbeddedServer) -> str:
    """The test's own nats-server, with nothing on it. Deleting a shared server's stream is neither faster nor safe."""
    return own_nats.url


@pytest.fixture(scope="session")
def databases(background: Background, tmp_path_factory: pytest.TempPathFactory) -> None:
    """`first_database.lay` may be called."""
    first_database.make_once(tmp_path_factory.getbasetemp(), background.run)


@pytest.fixture(scope="session")
def postgres_server(
    background: Background, databases: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedServer]:
    """A PostgreSQL for the whole session. `first_database.NAME` is migrated, for all to clone."""
    directory = first_database.lay(tmp_path_factory.mktemp("postgres") / "server")
    server = background.run(start_postgres(directory))
    yield server
    background.run(server.stop())


@pytest.fixture
def eventually() -> Eventually:
    """`await eventually(condition, deadline_s=20)`: wait until a condition (sync or async) holds, or fail."""

    async def wait(condition: Condition, deadline_s: float = 20.0, what: str = "") -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            if (waited := loop.time() - began) > deadline_s:
                pytest.fail(
                    f"{what or inspect.getsource(condition).strip()} did not hold within {deadline_s:g} s"
                )
            await asyncio.sleep(min(max(POLL_S, waited / 10), POLL_S_MAX))

    return wait
