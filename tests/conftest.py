"""Real servers for the tests: on random ports, in their own directories."""

import asyncio
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import first_database
import hypothesis
import pytest
import structlog
from waits import until
from xdist.scheduler import LoadScopeScheduling

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.postgres import start_postgres
from controller.adapters.embedded.server import EmbeddedServer
from events.journal import broker
from events.nats import connection

TOGETHER = (  # on one xdist worker: they share a fleet, parsed files, or another fixture of their module
    *("test_operating.py", "test_survival.py", "test_up.py"),
    *("test_upstream_changes.py", "test_upstream_faults.py"),
    *("test_docstrings.py", "test_house.py", "test_kv_feed.py"),
    *("test_poison_requests.py", "test_published_types.py"),
    *("test_replay_cli.py", "test_trace_chat.py", "test_trace_synthesis.py"),
)
Eventually = Callable[..., Awaitable[object]]
# No test trusts an external certificate, and each of hundreds of processes would load this machine's trusted ones (45 ms).
os.environ.setdefault("SSL_CERT_FILE", str(Path(__file__).with_name("no_authority.pem")))
# rich's tracebacks, with the sources and all variables in colours, cost 100 ms, and tests do not use them.
structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback
# A busy machine may keep a server waiting for seconds: a test that expects an unreachable one sets its own timeout.
connection.CONNECT_TIMEOUT_S = broker.API_DEADLINE_S = 10
# These take a core for ten seconds each; most others wait for servers. Spread among them, they use that waiting time.
COMPUTING = ("test_every_invariant_holds_in_", "test_mypy_finds_nothing")
T = TypeVar("T")

hypothesis.settings.register_profile(
    "any machine",  # a busy machine may take long for an example, and nothing is wrong
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any machine")


class OneByOne(LoadScopeScheduling):  # type: ignore[misc]  # xdist publishes no types
    """Schedules tests one after another. Tests that share a fixture go to one xdist worker, so that it is created once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        shared = file.endswith(TOGETHER)
        return f"{file} {'behind the broker' in nodeid}" if shared else nodeid


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option to record transcripts again: see `frontend/request/test_request_transcripts.py`."""
    parser.addoption(
        "--rewrite-transcripts", action="store_true", help="record the effects in all transcripts anew"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let each xdist worker collect from another file on, so that they do not all prepare the same files (once) at a time."""
    own = getattr(config, "workerinput", None)
    if own and config.args == config.getini("testpaths"):
        files = [str(file) for file in sorted(Path(__file__).parent.rglob("test_*.py"))]
        first = int(own["workerid"].removeprefix("gw")) * len(files) // own["workercount"]
        config.args = files[first:] + files[:first]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests into the order that all xdist workers share. Tests of many files only wait, or only compute: they are
    mixed, and long computations are spread evenly.
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
    """Exclude the collected tests, half a million objects, from every later garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneByOne | None:
    """Use this scheduler in `make test`, unless another one is selected (--dist)."""
    return OneByOne(config, log) if config.getvalue("dist") == "loadgroup" else None


class Background:
    """A thread with its own loop for the session: servers die with the thread that started them."""

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


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run the asynchronous tests of a file on the loop that it names, such as `LOOP = VirtualLoop`."""
    return {"loop": getattr(item.module, "LOOP", asyncio.new_event_loop)}  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """Reset logging and the umask after each test, also when a command that it ran in this process changed them."""
    mask = os.umask(0o022)
    yield
    os.umask(mask)
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def background() -> Iterator[Background]:
    """Runs coroutines for fixtures that are not async themselves."""
    made = Background()
    yield made
    made.close()


@pytest.fixture(scope="session")
def nats_server(background: Background, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A nats-server with JetStream for the whole session, for tests that leave nothing behind. Others use `nats_url`."""
    server = background.run(start_nats(tmp_path_factory.mktemp("nats")))
    yield server
    background.run(server.kill())


@pytest.fixture
def own_nats(background: Background, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A nats-server for one test in tmp_path/nats, to kill and restart (30 ms)."""
    server = background.run(start_nats(tmp_path / "nats", monitor=0))
    yield server
    background.run(server.kill())


@pytest.fixture
def nats_url(own_nats: EmbeddedServer) -> str:
    """A nats-server for one test, without any stream. Deleting a shared server's stream is neither faster nor safe."""
    return own_nats.url


@pytest.fixture(scope="session")
def databases(background: Background, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Allows the use of `first_database.lay`."""
    first_database.make_once(tmp_path_factory.getbasetemp(), background.run)


@pytest.fixture(scope="session")
def postgres_server(
    background: Background, databases: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedServer]:
    """A PostgreSQL for the whole session. Its database `first_database.NAME` is migrated, to be cloned."""
    directory = first_database.lay(tmp_path_factory.mktemp("postgres") / "server")
    server = background.run(start_postgres(directory))
    yield server
    background.run(server.stop())


@pytest.fixture
def eventually() -> Eventually:
    """`waits.until`, which new tests import."""
    return until
