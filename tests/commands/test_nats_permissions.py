"""`holdfast nats permissions`: the users of an external broker."""

import json
import os
from pathlib import Path

import pytest
from typed_commands import run_command

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.nats_users import BrokerUsers
from events.journal.nats import NatsJournal
from events.nats import keys
from events.nats.urls import as_user, with_keys


def typed(*words: str) -> tuple[int, str, str]:
    done = run_command(("nats", "permissions", *words), {})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.servers
async def test_a_broker_accepts_the_printed_configuration_and_a_second_run_prints_the_same(
    tmp_path: Path,
) -> None:
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


def test_printing_names_and_subjects_needs_no_seeds() -> None:
    code, printed, _ = typed("-o", "json", "--worker", "w7")
    users = {one["name"]: one for one in json.loads(printed)}
    assert code == 0 and "live.beat.w7" in users["worker-w7"]["publish"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "name the folder to create them in with --keys"),
        (("--worker", "w0+x"), "'w0+x' is neither a worker's name nor NAME+N"),
    ],
)
def test_invalid_arguments_are_reported_in_one_sentence(
    words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    code, _, error = typed("--data", str(tmp_path), *words)
    assert code == 2 and says in error and error.count("\n") == 1


def test_a_seed_is_noticed_although_the_folders_time_has_not_changed(tmp_path: Path) -> None:
    """The clock of file systems is coarse: two changes within a few milliseconds have the same time."""
    users = BrokerUsers(tmp_path)
    users.make(["worker-w0"])
    users.written()
    users.changed()
    assert not users.changed()
    before = tmp_path.stat()
    keys.kept(tmp_path, "worker-w1")
    os.utime(tmp_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert users.changed()
