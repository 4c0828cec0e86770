"""Creates and reads the nkeys with which processes authenticate to the broker.

An nkey is an Ed25519 key pair, and its seed (the private key) is in a file. The broker knows only the public key. The process
sends no seed to the broker, but signs a nonce with the seed.
"""

import os
import time
from pathlib import Path

from events.errors import BadSetting
from events.nats.urls import SUFFIX, account
from events.process.key_file import write_private

SEED_BYTES = 32
ADMITTED_WITHIN_S = 5.0  # longest wait until the broker accepts a new seed
POLL_S = 0.02
ADMITTED_SUFFIX = ".pub"  # a file with this suffix beside a seed means that the broker accepts the seed
KNOWS_INTAKE = ".knows-intake"  # a file beside a seed: this process can send its facts to the intake
INTAKE = ".intake"  # a file beside a seed: the broker lets this account publish facts only to the intake


def seed_file(folder: Path, name: str) -> Path:
    """Return the path of the file with an account's seed."""
    return folder / f"{name}{SUFFIX}"


def kept(folder: Path, name: str) -> bool:
    """Create a seed for an account if it has none. The seed is readable by its owner alone. Return True if the seed is new.

    Raise OSError if the file cannot be written.
    """
    path = seed_file(folder, name)
    if path.exists():
        return False
    import nkeys  # imported late: takes 20 ms, and a worker's keeper process would hold the module in memory

    fresh = folder / f".{name}.{os.getpid()}.new"
    seed = nkeys.encode_seed(os.urandom(SEED_BYTES), nkeys.PREFIX_BYTE_USER).decode()
    write_private(fresh, seed + "\n")
    try:
        os.link(fresh, path)  # fails if another process has created the seed first
    except FileExistsError:
        return False
    finally:
        fresh.unlink()
    return True


def join(folder: Path, name: str) -> None:
    """Create a seed for an account if it has none, and then wait up to 5 s until the fleet's broker accepts the new seed.

    Raise OSError if a file cannot be written.
    """
    knows_intake(folder, name)
    if not kept(folder, name):
        return
    until = time.monotonic() + ADMITTED_WITHIN_S
    while not (folder / f"{name}{ADMITTED_SUFFIX}").exists() and time.monotonic() < until:
        time.sleep(POLL_S)


def knows_intake(folder: Path, name: str) -> None:
    """Record in a file beside the seed that this process can send its facts to a controller's fact intake instead of the
    journal.

    Raise OSError if the file cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / f"{name}{KNOWS_INTAKE}").touch(mode=0o600)


def uses_intake(url: str) -> bool:
    """Return whether the account in `url` must send its facts to a controller's fact intake instead of the journal. The result
    can change while the process runs."""
    seed = account(url).get("nkeys_seed", "")
    return bool(seed) and Path(seed).with_suffix(INTAKE).exists()


def public(folder: Path, name: str) -> str:
    """Return the public key of an account. Raise BadSetting if the account's file is missing or holds no seed."""
    import nkeys

    path = seed_file(folder, name)
    try:
        return str(nkeys.from_seed(bytearray(path.read_bytes().strip())).public_key.decode())
    except (OSError, ValueError, nkeys.NkeysError) as error:
        raise BadSetting(f"{path} is not an nkey seed: {error or type(error).__name__}") from error


def users(folder: Path) -> list[str]:
    """Return the names of the accounts that have a seed in a folder."""
    return sorted(path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}"))
