"""The nkeys by which processes authenticate to the broker: Ed25519 pairs with the seed in a file.

The broker knows the public key. The seed never leaves its file and this process: the broker receives a signature of a nonce.
"""

import contextlib
import os
import time
from pathlib import Path

from events.errors import BadSetting
from events.nats.urls import SUFFIX, account

SEED_BYTES = 32
ADMITTED_WITHIN_S = 5.0  # how long to wait until the broker accepts a new seed
POLL_S = 0.02
ADMITTED_SUFFIX = ".pub"  # beside a seed: the broker accepts it
KNOWS_INTAKE = ".knows-intake"  # beside a seed: this process can send its facts to the intake
INTAKE = ".intake"  # beside a seed: the broker lets it publish facts to the intake only


def seed_file(folder: Path, name: str) -> Path:
    """Return the path of an account's seed."""
    return folder / f"{name}{SUFFIX}"


def kept(folder: Path, name: str) -> bool:
    """Create a seed for an account if it has none, readable by its owner alone; return whether it is new. Raise OSError."""
    path = seed_file(folder, name)
    if path.exists():
        return False
    import nkeys  # takes 20 ms, and a worker's keeper process would keep it in memory, too

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = folder / f".{name}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    seed = nkeys.encode_seed(os.urandom(SEED_BYTES), nkeys.PREFIX_BYTE_USER).decode()
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(seed + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(fresh, path)  # the first writer wins
    except FileExistsError:
        return False
    finally:
        fresh.unlink()
    return True


def join(folder: Path, name: str) -> None:
    """Create a seed if there is none, and wait a while until the fleet's broker knows it. Raise OSError."""
    knows_intake(folder, name)
    if not kept(folder, name):
        return
    until = time.monotonic() + ADMITTED_WITHIN_S
    while not (folder / f"{name}{ADMITTED_SUFFIX}").exists() and time.monotonic() < until:
        time.sleep(POLL_S)


def knows_intake(folder: Path, name: str) -> None:
    """Record beside a seed that its process can send its facts to the intake. Raise OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / f"{name}{KNOWS_INTAKE}").touch(mode=0o600)


def uses_intake(url: str) -> bool:
    """Return whether this account's facts go to the intake. The answer can change while the process runs."""
    seed = account(url).get("nkeys_seed", "")
    return bool(seed) and Path(seed).with_suffix(INTAKE).exists()


def public(folder: Path, name: str) -> str:
    """Return the public half of an account's key. Raise BadSetting."""
    import nkeys

    path = seed_file(folder, name)
    try:
        return str(nkeys.from_seed(bytearray(path.read_bytes().strip())).public_key.decode())
    except (OSError, ValueError, nkeys.NkeysError) as error:
        raise BadSetting(f"{path} is not an nkey seed: {error or type(error).__name__}") from error


def users(folder: Path) -> list[str]:
    """Return the accounts with a seed in a folder."""
    return sorted(path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}"))
