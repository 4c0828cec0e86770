"""Writes the broker's users to nats-server's configuration, each with its nkey and its subjects."""

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path

from events import permissions
from events.broker_users import ROLES, workers_of
from events.nats import keys
from events.permissions import BrokerUser
from events.subjects import token

SETTLED_NS = 1_000_000_000


class BrokerUsers:
    """Manages the broker users of one fleet. A folder holds one file per user, with the user's private key (nkey seed).

    A worker process sends its facts to a controller, which checks and publishes them (the intake,
    `controller.runtime.intake`). A process of an older release publishes its facts itself. Beside a seed, one file records
    that the process can use the intake, and another file records that the process must use it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # configured seeds: file, its mtime, whether facts go through intake
        self._seen: list[tuple[str, int, bool]] = []
        # revoked users' names by public key, because later log lines need them
        self._withdrawn: dict[str, str] = {}
        self._looked = 0  # mtime of the folder when `changed` last read it

    def make(self, processes: Iterable[str]) -> None:
        """Create the missing seeds of all roles and of the worker processes in `processes`.

        Raise OSError if a seed cannot be written.
        """
        for name in ROLES:
            keys.kept(self.folder, name)
        for name in processes:
            keys.knows_intake(self.folder, name)
            keys.kept(self.folder, name)

    def written(self) -> str:
        """Return the `authorization` block of nats-server's configuration for all users with a seed.

        Raise BadSetting if a user's file holds no valid seed.
        """
        self._seen = self._look()
        workers = [name for name in keys.users(self.folder) if workers_of(name)]
        by_intake = {name for name in workers if self._knows_intake(name)}
        # written before the broker applies the configuration; a refused process reads the files again
        for name in workers:
            given = self.folder / f"{name}{keys.INTAKE}"
            given.touch(mode=0o600) if name in by_intake else given.unlink(missing_ok=True)
        return configuration(permissions.users(workers, by_intake), self.folder)

    def withdraw(self, name: str, worker: str) -> list[str]:
        """Remove the seed of the user `name`, so that the broker revokes its access. Return the names of all revoked users.

        If no user has this name, revoke the users of all processes that run the worker `worker`. The caller may not know a
        user's name, because the name depends on the number of workers in the user's process.

        Raise OSError if a seed cannot be removed, BadSetting if a file holds no valid seed.
        """
        known = keys.users(self.folder)
        out = [name] if name in known else [user for user in known if token(worker) in workers_of(user)]
        for user in out:
            self._withdrawn[keys.public(self.folder, user)] = user
            keys.seed_file(self.folder, user).unlink(missing_ok=True)
        return out

    def changed(self) -> bool:
        """Return whether seeds were added, removed or changed since `written` last returned the configuration."""
        with contextlib.suppress(OSError):
            changed_at = self.folder.stat().st_mtime_ns
            # a later change can have the same time, because the clock of file systems is coarse
            recent = time.time_ns() - changed_at < SETTLED_NS  # noqa: TID251 (compared with a file's time)
            if changed_at != self._looked or recent:
                self._looked = changed_at
                return self._look() != self._seen
        return False

    def admitted(self) -> None:
        """Record in a file beside each seed that the broker admits the seed's user.

        A process with a new seed waits for this file before it connects.
        """
        for name in keys.users(self.folder):
            (self.folder / f"{name}{keys.ADMITTED_SUFFIX}").write_text(keys.public(self.folder, name) + "\n")

    def names_by_key(self) -> dict[str, str]:
        """Return the users' names by public key, which identifies a user in the broker's log. Revoked users are included."""
        known = {keys.public(self.folder, name): name for name in keys.users(self.folder)}
        return {**self._withdrawn, **known}

    def _knows_intake(self, name: str) -> bool:
        return (self.folder / f"{name}{keys.KNOWS_INTAKE}").exists()

    def _look(self) -> list[tuple[str, int, bool]]:
        found = ((name, keys.seed_file(self.folder, name)) for name in keys.users(self.folder))
        return [(seed.name, seed.stat().st_mtime_ns, self._knows_intake(name)) for name, seed in found]


def configuration(users: Iterable[BrokerUser], folder: Path) -> str:
    """Return the `authorization` block of nats-server's configuration for these users.

    The users' seeds must be in `folder`. Raise BadSetting if a seed is missing or invalid.
    """
    blocks = [_user(user, keys.public(folder, user.name)) for user in users]
    return "authorization {\n  users: [\n" + "\n".join(blocks) + "\n  ]\n}\n"


def _user(user: BrokerUser, public: str) -> str:
    def allowed(subjects: tuple[str, ...]) -> str:
        return "\n".join(f"          {json.dumps(subject, ensure_ascii=False)}" for subject in subjects)

    return (
        f"    # {user.name}\n    {{ nkey: {public}\n      permissions: {{\n"
        f"        publish: {{ allow: [\n{allowed(user.publish)}\n        ] }}\n"
        f"        subscribe: {{ allow: [\n{allowed(user.subscribe)}\n        ] }}\n      }} }}"
    )
