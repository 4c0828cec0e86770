"""Mutual authentication of a frontend and a worker by the fleet's shared key.

    frontend ── Hello(nonce) ──▶ worker
    frontend ◀── Challenge(nonce, proof) ── worker      proves that the worker is no foreign process on a free port
    frontend ── Proof ──▶ worker                        proves that the frontend belongs to the fleet
    frontend ◀── Welcome ── worker

It runs once per connection, before any user's data is sent. A proof is an HMAC-SHA256 (RFC 2104) of the prover's role and of both
sides' fresh nonces, so that no proof can be used twice. Without a key, neither side requests or sends a proof.

This is no encryption: any program that can read the traffic between two hosts can read the data.
"""

import contextlib
import hmac
import os
import secrets
from pathlib import Path

from events.errors import BadSetting, HoldfastError
from events.wire import Challenge, Hello, Proof

VARIABLE = "HOLDFAST_FLEET_KEY_FILE"
NONCE_BYTES = 16
KEY_BYTES = 32
KEY_BYTES_MIN, KEY_BYTES_MAX = 16, 4096


class UnknownPeer(HoldfastError):
    """The peer does not know the fleet's key."""


class FleetKey:
    """A secret that all processes of a fleet share. It is never displayed."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def read(cls, path: Path) -> "FleetKey":
        """Read the key from a file, without white space around it. Raise BadSetting."""
        try:
            with path.open("rb") as file:
                secret = file.read(KEY_BYTES_MAX + 1).strip()
        except OSError as error:
            raise BadSetting(f"fleet_key_file = {str(path)!r}: {error.strerror}") from error
        if not KEY_BYTES_MIN <= len(secret) <= KEY_BYTES_MAX:
            raise BadSetting(
                f"fleet_key_file = {str(path)!r} holds {len(secret)} bytes; it must hold {KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
            )
        return cls(secret)

    @classmethod
    def kept(cls, path: Path) -> "FleetKey":
        """Return the key in a file. A missing file is created with a new key, readable by its owner alone. Raise BadSetting, or
        OSError if the file cannot be written."""
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = path.with_suffix(".tmp")
            with contextlib.suppress(FileNotFoundError):
                fresh.unlink()
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(KEY_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        return cls.read(path)

    def proof(self, role: str, *said: bytes) -> bytes:
        """Return the proof that `role` knows the key, for this exchange. Each part is preceded by its length."""
        parts = [b"holdfast 1", role.encode(), *said]
        message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(self._secret, message, "sha256")

    def proves(self, proof: bytes, role: str, *said: bytes) -> bool:
        """Return whether a proof is valid, in constant time."""
        return hmac.compare_digest(proof, self.proof(role, *said))


def key_file(named: str, own: Path) -> str:
    """Return the path of a fleet's key file: `named`, or if that is empty `own`, which is created if it is missing. Raise
    BadSetting or OSError."""
    path = Path(named) if named else own
    (FleetKey.read if named else FleetKey.kept)(path)
    return str(path.resolve())


def nonce() -> bytes:
    """Return fresh random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


class FrontendHandshake:
    """The frontend's side of the handshake of one connection."""

    def __init__(self, key: FleetKey | None) -> None:
        self._key = key
        self._nonce = nonce() if key is not None else b""
        self.proven = key is None  # the worker has proved the key, or no proof is required

    def hello(self, frontend: str) -> Hello:
        """Return the frontend's first message."""
        return Hello(frontend, nonce=self._nonce)

    def answer(self, challenge: Challenge) -> Proof:
        """Return the proof that we know the key, for a worker that has proved it. Raise UnknownPeer."""
        if self._key is None:
            raise UnknownPeer("the worker requires its fleet's key: set --fleet-key-file")
        if not self._key.proves(challenge.proof, "worker", self._nonce, challenge.nonce):
            raise UnknownPeer("the worker does not know the fleet's key, or uses another one")
        self.proven = True
        return Proof(self._key.proof("frontend", challenge.nonce, self._nonce))


class WorkerHandshake:
    """The worker's side of the handshake: without a key it accepts a hello at once."""

    def __init__(self, key: FleetKey | None) -> None:
        self._key = key
        self._nonce = b""
        self._hello: Hello | None = None

    def challenge(self, hello: Hello) -> Challenge | None:
        """Return the challenge that a frontend must answer before it is welcome; None: there is none."""
        if self._key is None:
            return None
        self._hello, self._nonce = hello, nonce()
        if len(hello.nonce) != NONCE_BYTES:  # the frontend has no key: it will report that, and gets no proof
            return Challenge(self._nonce)
        return Challenge(self._nonce, self._key.proof("worker", hello.nonce, self._nonce))

    def proven(self, proof: Proof) -> Hello:
        """Return the hello of a frontend that has proved the key. Raise UnknownPeer."""
        hello, self._hello = self._hello, None
        if hello is None or self._key is None:
            raise UnknownPeer("a proof without a challenge")
        if not self._key.proves(proof.proof, "frontend", self._nonce, hello.nonce):
            raise UnknownPeer("the frontend does not know the fleet's key, or uses another one")
        return hello
