"""Authentication to a broker (nkey, JWT, account; over TCP and TLS), and the resulting permissions."""

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import nkeys
import pytest
from own_brokers import Start
from two_sides import SUBJECT, RecordingPeer
from waits import until

from controller.adapters.control_api import ControlApi
from controller.adapters.embedded.nats_users import BrokerUsers, configuration
from events import subjects
from events.broker_users import worker_user
from events.journal.nats import NatsJournal
from events.journal.port import JournalUnavailable
from events.nats import keys
from events.nats.bus import NatsBus, NoAnswer
from events.nats.channels import Channels
from events.nats.urls import BadBrokerUrl, account, addresses, as_user, check_url, masked, user, with_keys
from events.observations import ShutdownBegan, WorkerLeft
from events.permissions import BrokerUser, users

Eventually = Callable[..., Awaitable[None]]
JETSTREAM = 'jetstream {{ store_dir: "{}" }}'
WORKER = worker_user("w1")
LEFT = WorkerLeft(worker="w1", instance="i1", mode="graceful", exit=0)

pytestmark = pytest.mark.servers


class Operations:
    async def status(self) -> dict[str, str]:
        return {"leader": "c1"}


class Leader:
    async def ours_to_answer(self) -> bool:
        return True


async def check_every_role_works(url_of: Callable[[str], str], eventually: Eventually) -> None:
    """Let a controller, an operator, a frontend and a worker do their work through the broker."""
    controller = await NatsJournal.connect(url_of("controller"), "controller:c1")
    worker = await NatsJournal.connect(url_of(WORKER), "worker:w1")
    worker.observe(LEFT)
    assert await worker.flush(20)
    (event,) = [event async for batch in controller.read(0, until=1) for event in batch]
    assert event.fact == LEFT
    cell = controller.cell("lease")
    assert await cell.read() == (b"", 0)  # which makes the bucket
    await cell.write(b"c1", 0)
    api = ControlApi(url_of("controller"), Operations(), Leader())  # type: ignore[arg-type]
    serving = asyncio.ensure_future(api.run())
    async with asyncio.timeout(20):
        await api.serving.wait()
    async with (
        bus(url_of("operator")) as operator,
        bus(url_of("controller")) as asking,
        bus(url_of(WORKER)) as asked,
    ):
        assert await operator.request("control.status", {}, 20) == {"leader": "c1"}
        await asked.subscribe(subjects.live("w1"), lambda subject, body: {"draining": True})
        await eventually_answers(asking, subjects.command("drain", "w1"), {"draining": True})
    near, far = await Channels.open(url_of("frontend"), "near"), await Channels.open(url_of(WORKER), "far")
    let_in: list[RecordingPeer] = []

    def enter() -> RecordingPeer:
        let_in.append(RecordingPeer())
        return let_in[-1]

    await far.listen(SUBJECT, enter)
    async with asyncio.timeout(20):
        dialled = await near.dial(SUBJECT, RecordingPeer)
    let_in[0].channel.write(b"a token")
    await eventually(lambda: dialled.heard == b"a token")  # type: ignore[attr-defined]
    refused = [handle.connection.refused for handle in (controller, worker, near, far)]
    assert refused == [0] * 4
    for handle in (near, far, controller, worker):
        await handle.close()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def check_a_worker_cannot_act_as_another(url_of: Callable[[str], str], eventually: Eventually) -> None:
    """Let a worker attempt operations that belong to others."""
    journal = await NatsJournal.connect(url_of(WORKER), "worker:w1")
    journal.observe(ShutdownBegan(worker="w2", instance="i2", mode="graceful", grace_s=1.0, reason=""))
    await eventually(lambda: journal.connection.refused == 1, 20)
    async with bus(url_of(WORKER)) as forger:
        with pytest.raises(NoAnswer):
            await forger.request("control.drain", {"worker": "w2"}, 0.3)
        assert forger.connection.refused == 1
        await forger.subscribe("_INBOX.operator.>", lambda subject, body: None)
        await eventually(lambda: forger.connection.refused == 2, 20)
    await journal.close()


@contextlib.asynccontextmanager
async def bus(url: str) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(url, "bus", wait_s=20)
    try:
        yield made
    finally:
        await made.close()


async def eventually_answers(asking: NatsBus, subject: str, answer: dict[str, Any]) -> None:
    """Send requests until the responder's subscription has arrived."""
    assert await until(lambda: asking.request(subject, {}, 2), failing=(NoAnswer,)) == answer


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    """A folder with a seed for every account."""
    BrokerUsers(tmp_path / "seeds").make([WORKER])
    return tmp_path / "seeds"


async def test_nkeys(start: Start, seeds: Path, tmp_path: Path, eventually: Eventually) -> None:
    broker = await start(configuration(users([WORKER]), seeds) + JETSTREAM.format(tmp_path / "js"))
    url = with_keys(broker.url(), seeds)
    await check_every_role_works(lambda name: as_user(url, name), eventually)
    await check_a_worker_cannot_act_as_another(lambda name: as_user(url, name), eventually)


async def test_nkeys_under_tls(
    start: Start, authority: str, seeds: Path, tmp_path: Path, eventually: Eventually
) -> None:
    broker = await start(
        authority + "\n" + configuration(users([WORKER]), seeds) + JETSTREAM.format(tmp_path / "js")
    )
    url = with_keys(broker.url(scheme="tls"), seeds)
    await check_every_role_works(lambda name: as_user(url, name), eventually)


async def test_accounts_with_passwords(start: Start, tmp_path: Path, eventually: Eventually) -> None:
    said = [
        {"user": one.name, "password": "p@ss", "permissions": permissions(one)} for one in users([WORKER])
    ]
    broker = await start(
        f"authorization {{ users: {json.dumps(said)} }}\n" + JETSTREAM.format(tmp_path / "js")
    )
    await check_every_role_works(lambda name: f"{broker.url(f'{name}:p%40ss')}?user={name}", eventually)
    await check_a_worker_cannot_act_as_another(
        lambda name: f"{broker.url(f'{name}:p%40ss')}?user={name}", eventually
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_creds_with_a_jwt(
    start: Start, scheme: str, request: pytest.FixtureRequest, tmp_path: Path, eventually: Eventually
) -> None:
    config, creds = issued(tmp_path)
    tls = request.getfixturevalue("authority") if scheme == "tls" else ""
    broker = await start(f"{tls}\n{config}\n{JETSTREAM.format(tmp_path / 'js')}")

    def url_of(name: str) -> str:
        return f"{broker.url(scheme=scheme)}?creds={creds[name]}&user={name}"

    await check_every_role_works(url_of, eventually)
    await check_a_worker_cannot_act_as_another(url_of, eventually)


def issued(folder: Path) -> tuple[str, dict[str, Path]]:
    """Return the configuration of a broker that trusts an operator's JWTs, and each account's file, as `nsc` creates them."""
    operator, system, fleet = (
        Pair(kind) for kind in (nkeys.PREFIX_BYTE_OPERATOR, *[nkeys.PREFIX_BYTE_ACCOUNT] * 2)
    )
    unlimited = dict.fromkeys(
        ("subs", "data", "payload", "imports", "exports", "conn", "leaf", "mem_storage", "disk_storage"), -1
    )
    accounts = {
        one.public: operator.jwt(one.public, "account", {"limits": unlimited | storage})
        for one, storage in ((system, {"mem_storage": 0, "disk_storage": 0}), (fleet, {"wildcards": True}))
    }
    preload = "\n".join(f"  {name}: {jwt}" for name, jwt in accounts.items())
    config = (
        f"operator: {operator.jwt(operator.public, 'operator', {})}\nsystem_account: {system.public}\n"
        f"resolver: MEMORY\nresolver_preload {{\n{preload}\n}}"
    )
    creds = {}
    for one in users([WORKER]):
        pair = Pair(nkeys.PREFIX_BYTE_USER)
        rights = {"pub": {"allow": one.publish}, "sub": {"allow": one.subscribe}}
        jwt = fleet.jwt(pair.public, "user", {**rights, "subs": -1, "data": -1, "payload": -1})
        creds[one.name] = folder / f"{one.name}.creds"
        creds[one.name].write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{pair.seed}\n------END USER NKEY SEED------\n"
        )
    return config, creds


class Pair:
    """A pair of keys, which can issue JWTs (NATS' own kind, version 2)."""

    def __init__(self, kind: int) -> None:
        self.seed = nkeys.encode_seed(os.urandom(32), kind).decode()
        self._pair = nkeys.from_seed(bytearray(self.seed.encode()))
        self.public: str = self._pair.public_key.decode()

    def jwt(self, subject: str, kind: str, about: dict[str, Any]) -> str:
        claims = {"iss": self.public, "sub": subject, "name": kind, "jti": subject, "iat": 1_700_000_000}
        parts = [
            {"typ": "JWT", "alg": "ed25519-nkey"},
            {**claims, "nats": {**about, "type": kind, "version": 2}},
        ]
        said = ".".join(plain(json.dumps(part).encode()) for part in parts)
        return f"{said}.{plain(self._pair.sign(said.encode()))}"


def plain(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def permissions(one: BrokerUser) -> dict[str, Any]:
    return {"publish": {"allow": one.publish}, "subscribe": {"allow": one.subscribe}}


async def test_a_process_with_a_seed_unknown_to_the_broker_learns_why(
    start: Start, seeds: Path, tmp_path: Path
) -> None:
    broker = await start(configuration(users([WORKER]), seeds))
    keys.kept(tmp_path / "others", "operator")
    for url in (broker.url(), as_user(with_keys(broker.url(), tmp_path / "others"), "operator")):
        stranger = await NatsBus.connect(url, "stranger", wait_s=1.0)
        assert stranger.since is None and "Authorization Violation" in stranger.connection.why
        await stranger.close()


async def test_only_permitted_roles_create_the_stream(
    start: Start, seeds: Path, tmp_path: Path, eventually: Eventually
) -> None:
    broker = await start(configuration(users([WORKER]), seeds) + JETSTREAM.format(tmp_path / "js"))
    url = with_keys(broker.url(), seeds)
    worker = await NatsJournal.connect(as_user(url, WORKER), "worker:w1", make=False)
    worker.observe(LEFT)
    with pytest.raises(JournalUnavailable):
        await worker.last_seq()
    controller = await NatsJournal.connect(as_user(url, "controller"), "controller:c1")
    assert await worker.flush(20) and await controller.last_seq() == 1
    assert worker.connection.refused == 0
    for handle in (worker, controller):
        await handle.close()


def test_a_url_names_the_account(tmp_path: Path) -> None:
    keys.kept(tmp_path / "a, b?", "operator")
    url = as_user(with_keys("nats://a:1,nats://b:2", tmp_path / "a, b?"), "operator")
    check_url(url)
    assert addresses(url) == ["nats://a:1", "nats://b:2"] and masked(url) == "nats://a:1,nats://b:2"
    assert account(url) == {"nkeys_seed": str(tmp_path / "a, b?" / "operator.nk")} and user(url) == "operator"
    assert as_user("nats://a:1", "operator") == "nats://a:1"


@pytest.mark.parametrize(
    ("aside", "says"),
    [
        ("nkey=/nowhere/x.nk", "nkey names /nowhere/x.nk, and there is no such file"),
        ("creds=/nowhere/x.creds", "creds names /nowhere/x.creds, and there is no such file"),
        ("seed=SUABC", "unknown parameter 'seed' of a broker's URL"),
        ("nkey=", "unknown parameter 'nkey' of a broker's URL"),
    ],
)
def test_an_invalid_url_is_one_clear_error(aside: str, says: str) -> None:
    with pytest.raises(BadBrokerUrl, match=says) as error:
        check_url(f"nats://me:hush@a:1?{aside}")
    assert "hush" not in str(error.value) and "SUABC" not in str(error.value)


def test_a_folder_without_the_seed_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BadBrokerUrl, match=r"no seed for the account 'worker-w9'.*holdfast nats permissions"):
        as_user(with_keys("nats://127.0.0.1:1", tmp_path), "worker-w9")


def test_a_seed_is_readable_by_its_owner_alone_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "seeds"
    assert keys.kept(folder, "operator") and not keys.kept(folder, "operator")
    assert keys.seed_file(folder, "operator").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert keys.public(folder, "operator").startswith("U") and keys.users(folder) == ["operator"]
    assert [path.name for path in folder.iterdir()] == ["operator.nk"]


def test_members_of_a_cluster_may_leave_out_the_scheme_of_the_first() -> None:
    """`nats://a:4222,b:4222` is one URL to other NATS clients."""
    together = "nats://user:word@a:4222,b:4222, tls://c:4222,d?nkey=FILE"
    assert addresses(together) == ["nats://user:word@a:4222", "nats://b:4222", "tls://c:4222", "nats://d"]
    assert account(together) == {"user": "user", "password": "word", "nkeys_seed": "FILE"}
    check_url("nats://a:4222,b:4222")
    assert masked("nats://user:word@a:4222,b:4222") == "nats://a:4222,nats://b:4222"
    for wrong in ("a:4222,nats://b:4222", "nats://a:4222,", "nats://a:4222,b:0"):
        with pytest.raises(BadBrokerUrl):
            check_url(wrong)
