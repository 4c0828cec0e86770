"""A fleet on a shared host gives others no access and shows no secrets.

That holds with a directory of an earlier release, too.
"""

import asyncio
import json
import secrets
from pathlib import Path

import aiohttp
import asyncpg
import psutil
from fleet import files_holding, holdfast, running
from release_before import OWNER, lay_database, lay_journal
from store_databases import execute
from waits import until

from benchmarks.local_fleet import LocalFleet
from controller.processes.operator_client import read_all
from events.broker_users import ROLES
from events.nats.bus import NatsBus
from events.observations import WorkerJoined
from events.wire import Challenge, Generate, Hello, Sampling, Splitter, encode, to_frontend

FAST = ("--workers", "2", "--canary-interval", "0.5")


async def test_a_fleet_of_an_earlier_release_gets_access_control_and_loses_nothing(tmp_path: Path) -> None:
    data = tmp_path / "fleet"
    data.mkdir()
    (data / "version").write_text("1\n")
    await lay_journal(data / "nats")
    await lay_database(data / "postgres")
    for path in (data, *data.glob("*"), *(data / "nats").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # as that release left them
    async with running(data, *FAST, stops=True) as fleet:
        await fleet.until(lambda s: s["projector"]["lag"] == 0)
        reader = holdfast("database", "reader", "--data", str(data)).stdout.strip()
        kept = await execute(reader, "SELECT count(*), min(seq) FROM holdfast.fleet_events")
        assert kept[0]["count"] > 100 and kept[0]["min"] == 1
        verified = holdfast("replay", "verify", "--data", str(data))
        assert verified.returncode == 0, verified.stdout + verified.stderr
        await the_former_superuser_is_refused(fleet, reader)
        rebuilt = holdfast("replay", "rebuild", "--data", str(data))
        assert rebuilt.returncode == 0, rebuilt.stdout + rebuilt.stderr
        assert (await execute(reader, "SELECT count(*) FROM holdfast.fleet_events"))[0][0] >= kept[0]["count"]
        await no_worker_talks_to_a_stranger(data)
        await the_broker_admits_known_accounts_only(fleet)
        no_secret_in_sight(fleet)
        assert open_to_others(data) == []
    assert open_to_others(data) == []
    assert [name for name in files_holding(data, *secrets_of(data)) if not name.startswith("secrets/")] == []
    assert not (data / "postgres" / "database.holdfast").exists()


async def test_a_fleets_ports_require_keys_and_answer_no_other_site(tmp_path: Path) -> None:
    first, second, wrong = (f"sk-{name}-{secrets.token_hex(8)}" for name in ("first", "second", "wrong"))
    keys = tmp_path / "keys"
    keys.write_text(f"team-a:{first}\n")
    async with running(tmp_path / "fleet", *FAST, "--api-key-file", str(keys)) as fleet:
        await fleet.healthy(2)
        async with aiohttp.ClientSession() as session:
            for key, expected in (("", 401), (wrong, 401), (second, 401), (first, 200)):
                assert await asked(session, fleet, key) == expected, key
            fresh = keys.with_suffix(".new")
            fresh.write_text(f"team-a:{second}\n")
            fresh.replace(keys)

            async def revoked() -> bool:
                return await asked(session, fleet, first) != 200

            await until(revoked, 30, every_s=0.1)  # it reads the file again
            assert await asked(session, fleet, second) == 200
            shown = await no_other_site_is_answered(session, fleet)
        shown += [" ".join(process.cmdline()) for process in fleet.family() if process.is_running()]
        shown += [holdfast(*words, "--data", str(fleet.data)).stdout for words in (("status",), ("events",))]
    assert [text for text in shown for key in (first, second, wrong) if key in text] == []
    assert files_holding(tmp_path / "fleet", first, second, wrong) == []


async def asked(session: aiohttp.ClientSession, fleet: LocalFleet, key: str) -> int:
    """Request two tokens with a key; return the status. A refusal has OpenAI's format."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": "sim", "prompt": [300, 301], "max_tokens": 2}
    async with session.post(f"{fleet.url}/v1/completions", json=body, headers=headers) as answer:
        said = await answer.json()
        if answer.status != 200:
            assert said["error"].keys() == {"message", "type", "param", "code"}
            assert (
                said["error"]["code"] == "invalid_api_key" and answer.headers["WWW-Authenticate"] == "Bearer"
            )
        return answer.status


async def no_other_site_is_answered(session: aiohttp.ClientSession, fleet: LocalFleet) -> list[str]:
    """Query each admin port as another site's page would, then as Prometheus does; return the ports that answer the latter."""
    ports = [
        p["url"] for p in (await fleet.status())["processes"] if str(p.get("url", "")).startswith("http")
    ]
    assert len(ports) >= 4, "frontend, controller, projector and workers have one"
    shown = []
    for url in ports:
        for headers in (
            {"Host": "evil.example"},
            {"Origin": "http://evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
        ):
            for method, path in (("GET", "/metrics"), ("POST", "/busy_threshold"), ("POST", "/route")):
                async with session.request(method, url + path, json={}, headers=headers) as answer:
                    assert answer.status == 403, (url, method, path, headers)
        async with session.get(f"{url}/metrics") as answer:
            assert answer.status == 200
            shown.append(await answer.text())
    return shown


def open_to_others(data: Path) -> list[Path]:
    """Return the paths in a fleet's directory, itself included, that another user could open."""
    found = [data, *data.rglob("*")]
    assert len(found) > 500 and {"run", "spool", "logs", "secrets"} <= {path.name for path in found}
    return [path for path in found if path.lstat().st_mode & 0o077]


async def the_former_superuser_is_refused(fleet: LocalFleet, reader: str) -> None:
    """The former superuser has no access any more."""
    place = reader.partition("@")[2]
    for account in (OWNER, "holdfast_reader", "holdfast_owner"):
        try:
            await asyncpg.connect(f"postgresql://{account}@{place}", timeout=10)
        except asyncpg.InvalidAuthorizationSpecificationError:
            continue
        raise AssertionError(f"{account} got in")


async def no_worker_talks_to_a_stranger(data: Path) -> None:
    """A client without the fleet's key that connects to a worker gets the challenge and nothing else."""
    joined = {
        fact.worker: fact for event in await read_all(data) if isinstance(fact := event.fact, WorkerJoined)
    }
    for fact in (joined["w0"], joined["w1"]):
        host, _, port = fact.url.removeprefix("tcp://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        asked = Generate(0, "r", [1, 2, 3], 3, Sampling(max_tokens=4))
        writer.write(encode(Hello("a-stranger")) + encode(asked))
        async with asyncio.timeout(20):
            heard = [to_frontend.decode(body) for body in Splitter().feed(await reader.read())]
        writer.close()
        assert [type(frame) for frame in heard] == [Challenge]


def secrets_of(data: Path) -> list[str]:
    passwords = json.loads((data / "secrets" / "postgres.json").read_text())
    seeds = [path.read_text().strip() for path in (data / "secrets" / "nats").glob("*.nk")]
    assert len(seeds) == len(ROLES) + 2  # one for each role, and for each worker
    return [*passwords.values(), (data / "secrets" / "fleet.key").read_text().strip(), *seeds]


async def the_broker_admits_known_accounts_only(fleet: LocalFleet) -> None:
    """It has one port, and no monitoring page beside it."""
    (pid,) = (p["pid"] for p in (await fleet.status())["processes"] if p["role"] == "nats")
    (door,) = (c.laddr for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    stranger = await NatsBus.connect(f"nats://{door.ip}:{door.port}", "stranger", wait_s=1.0)
    assert stranger.since is None and "Authorization Violation" in stranger.connection.why
    await stranger.close()


def no_secret_in_sight(fleet: LocalFleet) -> None:
    """No password is where others on this host look: among the arguments of processes, in what commands show, in logs."""
    passwords = secrets_of(fleet.data)
    shown = [" ".join(process.cmdline()) for process in fleet.family() if psutil.pid_exists(process.pid)]
    shown += [holdfast("status", *flags, "--data", str(fleet.data)).stdout for flags in ((), ("-o", "json"))]
    shown += [path.read_text() for path in (fleet.data / "run").iterdir()]
    shown += [path.read_text() for path in fleet.data.rglob("*.log")]
    assert len(shown) > 15
    assert [text for text in shown for password in passwords if password in text] == []
