"""nats-py still matches the assumptions of `events.nats.overrides`, and its defects are worked around.

A digest is of the source of an overridden or accessed member. If one differs, nats-py has changed there: read the change, correct
`events/nats/overrides.py` if necessary, and put the new digest here.
"""

import asyncio
import hashlib
import inspect
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from nats.aio import transport
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import MaxPayloadError
from nats.protocol import parser
from nats_world import Broker

from events.nats.connection import BrokerConnection
from events.nats.overrides import FastClient, RawParser, load_web_sockets

Eventually = Callable[..., Awaitable[None]]

SOURCES: dict[str, tuple[Any, str, str]] = {
    "what reads and hands on": (parser, "Parser", "16e9297d2063"),
    "the caller of the parser": (Client, "_read_loop", "c8cb39386948"),
    "what a message becomes": (Client, "_process_msg", "d163fe8c84d1"),
    "what is written when": (Client, "_flusher", "1451c10f6026"),
    "what wakes the writer": (Client, "_flush_pending", "ca780fd658a9"),
    "how a publication is spelled": (Client, "_send_publish", "be5a52336f2c"),
    "how a connection is begun": (Client, "_connect_to_server", "09cd5ac52157"),
    "the choice of a server": (Client, "_select_next_server", "8b84ef436c90"),
    "what follows the broker's INFO": (Client, "_process_connect_init", "9a9744991851"),
    "how a connection is remade": (Client, "_attempt_reconnect", "fa8dd7c3be4b"),
    "where the stream lies": (transport, "TcpTransport", "9c004cd927a9"),
}


def digest(thing: Any) -> str:
    """Return a digest of a source, independent of indentation and comments."""
    lines = [line.strip() for line in inspect.getsource(thing).splitlines()]
    source = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.blake2s(source.encode(), digest_size=6).hexdigest()


@pytest.mark.parametrize("what", SOURCES)
def test_nats_py_has_not_changed_there(what: str) -> None:
    home, name, known = SOURCES[what]
    assert digest(getattr(home, name)) == known, f"nats-py has changed {what}: {name}"


OVERRIDDEN = [
    (base, name)
    for kind, base in ((FastClient, Client), (RawParser, parser.Parser))
    for name in vars(kind)
    if callable(getattr(kind, name)) and hasattr(base, name) and name not in ("__init__", "__doc__")
]


def test_exactly_these_methods_are_overridden() -> None:
    assert {name for _, name in OVERRIDDEN} == {
        "_process_msg", "_connect_to_server", "_process_connect_init", "_attempt_reconnect", "parse"
    }  # fmt: skip


@pytest.mark.parametrize(("base", "name"), OVERRIDDEN)
def test_an_override_accepts_the_arguments_of_nats_py(base: Any, name: str) -> None:
    ours = {Client: FastClient, parser.Parser: RawParser}[base]
    theirs, mine = inspect.signature(getattr(base, name)), inspect.signature(getattr(ours, name))
    assert list(mine.parameters) == list(theirs.parameters)
    assert inspect.iscoroutinefunction(getattr(base, name)) == inspect.iscoroutinefunction(
        getattr(ours, name)
    )


@pytest.mark.parametrize(
    ("attribute", "kind"),
    [
        ("_pending", list),
        ("_pending_data_size", int),
        ("_server_info", dict),
        ("_ps", parser.Parser),
        ("_transport", type(None)),
    ],
)
def test_a_client_has_the_members_that_are_accessed(attribute: str, kind: type) -> None:
    assert isinstance(getattr(Client(), attribute), kind)


async def test_the_other_accessed_members_exist() -> None:
    assert {"_io_reader", "_io_writer"} <= vars(TcpTransport()).keys()  # type: ignore[no-untyped-call]
    assert "_id" in inspect.getsource(Subscription.__init__)
    assert hasattr(transport, "aiohttp")
    assert {"buf", "state", "needed"} <= vars(parser.Parser(None)).keys()
    assert hasattr(asyncio.StreamReader(), "_buffer")
    assert "_over_ssl" in inspect.getsource(asyncio.StreamReaderProtocol)


def test_web_sockets_get_aiohttp() -> None:
    load_web_sockets("nats://one:4222,wss://two")
    assert transport.aiohttp is not None  # type: ignore[attr-defined]


# --- workarounds, on a real broker ----------------------------------------------------------------------------


@pytest.fixture
async def connection(broker: Broker) -> AsyncIterator[BrokerConnection]:
    made = await BrokerConnection.open(broker.url, "test")
    yield made
    await made.close()


@pytest.mark.servers
async def test_messages_of_the_fast_paths_are_received_like_published_ones(
    connection: BrokerConnection, eventually: Eventually
) -> None:
    heard: list[tuple[bytes, bytes, bytes, bytes | None]] = []
    await connection.subscribe_raw("a.*", lambda *message: heard.append(message))
    await connection.client.flush()
    await connection.client.publish("a.b", b"body", "re.ply", {"k": "v"})
    await connection.client.flush()
    assert connection.client.publish_now("a.b", b"body", "re.ply", {"k": "v"})
    await connection.client.publish("a.b", b"headbody", "re.ply")
    assert connection.client.post(b"a.b re.ply ", b"head", b"body")
    connection.client.write()
    await eventually(lambda: len(heard) == 4)
    assert heard[0] == heard[1] == (b"a.b", b"re.ply", b"body", b"NATS/1.0\r\nk: v\r\n\r\n")
    assert heard[2] == heard[3] == (b"a.b", b"re.ply", b"headbody", None)
    assert connection.client.unsent() == 0


@pytest.mark.servers
async def test_a_raw_message_larger_than_one_read_reaches_its_handler_too(
    connection: BrokerConnection, eventually: Eventually
) -> None:
    heard: list[bytes] = []
    await connection.subscribe_raw("a.b", lambda subject, reply, body, headers: heard.append(body))
    await connection.client.publish("a.b", body := bytes(range(256)) * 3000)
    await eventually(lambda: heard == [body])
    assert connection.client.taken > len(body)


@pytest.mark.servers
async def test_a_payload_above_the_brokers_limit_is_refused(connection: BrokerConnection) -> None:
    with pytest.raises(MaxPayloadError):
        connection.client.publish_now("a.b", bytes(connection.client.max_payload + 1), "c", {})


@pytest.mark.servers
async def test_the_brokers_reported_properties_are_known(connection: BrokerConnection) -> None:
    assert connection.client.server_version.startswith(str(connection.client.connected_server_version.major))
    assert not connection.client.clustered


@pytest.mark.servers
async def test_data_unwritten_when_the_broker_died_is_never_sent(
    broker: Broker, connection: BrokerConnection, eventually: Eventually
) -> None:
    heard: list[bytes] = []
    await connection.subscribe_raw("a.b", lambda subject, reply, body, headers: heard.append(body))
    await connection.client.flush()
    assert connection.client.post(b"a.b  ", b"", b"late")
    await broker.server.kill()
    await eventually(lambda: not connection.connected)
    await broker.start()
    await eventually(lambda: connection.connected)
    await connection.client.publish("a.b", b"fresh")
    await eventually(lambda: heard == [b"fresh"])


async def test_a_connection_that_broke_while_connecting_is_closed(eventually: Eventually) -> None:
    """The second connection, of a broker that closes the first one and greets the second one with nonsense."""
    let_go: list[int] = []
    came = itertools.count(1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(came)
        writer.write(b"nonsense\r\n" if number == 2 else b'INFO {"max_payload":1000}\r\n')
        async for line in reader:
            if line == b"PING\r\n":
                writer.write(b"PONG\r\n")
                if number == 1:
                    break
        let_go.append(number)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = await BrokerConnection.open(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", "test")
    await eventually(lambda: let_go == [1, 2])
    await eventually(lambda: connection.connected)
    await connection.close()
    await eventually(lambda: let_go == [1, 2, 3])
    server.close()


@pytest.mark.servers
async def test_a_closed_client_does_not_connect_again(broker: Broker) -> None:
    """Also if the cancellation that ends the reconnecting is swallowed, as `wait_for` of Python 3.11 does occasionally."""
    connection = await BrokerConnection.open(broker.url, "test")
    await connection.close()
    with pytest.raises(asyncio.CancelledError):
        await connection.client.connect(broker.url)
