"""`holdfast nats permissions`: the users of a broker of one's own."""

import json
from pathlib import Path

import pytest
from typed_commands import run_command

from controller.adapters.embedded.servers import start_nats
from events.journal.nats import NatsJournal
from events.nats import keys
from events.nats.urls import as_user, with_keys


def typed(*words: str) -> tuple[int, str, str]:
    done = run_command(("nats", "permissions", *words), {})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.servers
async def test_a_broker_takes_what_is_printed_and_a_second_printing_is_the_same(tmp_path: Path) -> None:
    seeds = tmp_path / "seeds"
    code, printed, _ = typed("--keys", str(seeds), "--worker", "w0", "--worker", "x0+3")
    assert code == 0 and keys.users(seeds) == sorted(
        [
            "controller",
            "frontend",
            "notifier",
            "operator",
            "planner",
            "projector",
            "reader",
            "supervisor",
            "worker-w0",
            "worker-x0+3",
        ]
    )
    assert typed("--keys", str(seeds))[1] == printed
    assert not any(keys.seed_file(seeds, name).read_text().strip() in printed for name in keys.users(seeds))
    server = await start_nats(tmp_path / "nats", users=printed)
    try:
        url = with_keys(server.url, seeds)
        journal = await NatsJournal.connect(as_user(url, "controller"), "controller:c1")
        assert await journal.last_seq() == 0
        await journal.close()
    finally:
        await server.kill()


def test_names_and_subjects_alone_need_no_seeds() -> None:
    code, printed, _ = typed("-o", "json", "--worker", "w7")
    users = {one["name"]: one for one in json.loads(printed)}
    assert code == 0 and "live.beat.w7" in users["worker-w7"]["publish"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "name the folder that shall have them with --keys"),
        (("--worker", "w0+x"), "'w0+x' is no worker's name, or NAME+N"),
    ],
)
def test_what_cannot_be_printed_is_one_sentence(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    code, _, error = typed("--data", str(tmp_path), *words)
    assert code == 2 and says in error and error.count("\n") == 1
