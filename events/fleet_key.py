"""Authenticates a frontend and a worker to each other by the fleet's shared key.

    frontend ── Hello(nonce) ──▶ worker
    frontend ◀── Challenge(nonce, proof) ── worker      proves that the worker belongs to the fleet
    frontend ── Proof ──▶ worker                        proves that the frontend belongs to the fleet
    frontend ◀── Welcome ── worker

The arrows are messages. The handshake runs once per connection, before any user's data is sent. The frontend requires the
worker's proof, because a program outside the fleet can listen on the port of a worker that has ended. A proof is an HMAC-SHA256
(RFC 2104) of the prover's role and of the fresh nonces of frontend and worker, so that no proof can be used twice. Without a
key, neither frontend nor worker requests or sends a proof.

The handshake does not encrypt: any program that can read the traffic between two hosts can read the data.
"""

import hmac
import secrets
from pathlib import Path

from events.errors import BadSetting, HoldfastError
from events.process.key_file import write_private
from events.wire import Challenge, Hello, Proof

VARIABLE = "HOLDFAST_FLEET_KEY_FILE"
NONCE_BYTES = 16
KEY_BYTES = 32
KEY_BYTES_MIN, KEY_BYTES_MAX = 16, 4096


class UnknownPeer(HoldfastError):
    """The peer does not know the fleet's key."""


class FleetKey:
    """A secret that all processes of a fleet share. The secret is never displayed."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def read(cls, path: Path) -> "FleetKey":
        """Read the key from a file and strip white space around the key.

        Raise BadSetting if the file cannot be read, or if the key is too short or too long.
        """
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
        """Return the key from a file. If the file is missing, create the file with a new key. Only the owner can read the new
        file.

        Raise BadSetting if the key cannot be read or has an invalid length. Raise OSError if the file cannot be written.
        """
        if not path.exists():
            write_private(path, secrets.token_urlsafe(KEY_BYTES) + "\n")
        return cls.read(path)

    def proof(self, role: str, *said: bytes) -> bytes:
        """Return the HMAC which proves that the peer with the role `role` knows the key. `said` are the nonces of this
        handshake.

        The HMAC covers the role and the nonces, each preceded by its length.
        """
        parts = [b"holdfast 1", role.encode(), *said]
        message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(self._secret, message, "sha256")

    def proves(self, proof: bytes, role: str, *said: bytes) -> bool:
        """Return whether `proof` is the valid proof of the peer with `role` for the nonces `said`. The comparison takes
        constant time."""
        return hmac.compare_digest(proof, self.proof(role, *said))


def key_file(named: str, own: Path) -> str:
    """Return the absolute path of the fleet's key file: `named` or, if `named` is empty, the default `own`.

    If `own` is used and is missing, create it with a new key. Raise BadSetting if the key is not valid, or OSError if the file
    cannot be written.
    """
    path = Path(named) if named else own
    (FleetKey.read if named else FleetKey.kept)(path)
    return str(path.resolve())


def nonce() -> bytes:
    """Return 16 fresh random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


class FrontendHandshake:
    """The frontend's side of the handshake of one connection."""

    def __init__(self, key: FleetKey | None) -> None:
        self._key = key
        self._nonce = nonce() if key is not None else b""
        self.proven = key is None  # the worker has proved that it knows the key, or no proof is required

    def hello(self, frontend: str) -> Hello:
        """Return the frontend's first message of the handshake, with a nonce if the frontend has a key."""
        return Hello(frontend, nonce=self._nonce)

    def answer(self, challenge: Challenge) -> Proof:
        """Return the frontend's proof, after checking the worker's proof in `challenge`. Raise UnknownPeer if the worker's
        proof is invalid or the frontend has no key."""
        if self._key is None:
            raise UnknownPeer("the worker requires its fleet's key: set --fleet-key-file")
        if not self._key.proves(challenge.proof, "worker", self._nonce, challenge.nonce):
            raise UnknownPeer("the worker does not know the fleet's key, or uses another one")
        self.proven = True
        return Proof(self._key.proof("frontend", challenge.nonce, self._nonce))


class WorkerHandshake:
    """The worker's side of the handshake of one connection. A worker without a key accepts any hello."""

    def __init__(self, key: FleetKey | None) -> None:
        self._key = key
        self._nonce = b""
        self._hello: Hello | None = None

    def challenge(self, hello: Hello) -> Challenge | None:
        """Return the challenge that the frontend must answer before the worker sends its welcome. Return None if the worker
        has no key."""
        if self._key is None:
            return None
        self._hello, self._nonce = hello, nonce()
        # the frontend has no key: it gets no proof, and reports the missing key
        if len(hello.nonce) != NONCE_BYTES:
            return Challenge(self._nonce)
        return Challenge(self._nonce, self._key.proof("worker", hello.nonce, self._nonce))

    def proven(self, proof: Proof) -> Hello:
        """Return the frontend's hello if `proof` is valid. Raise UnknownPeer if `proof` is not valid, or if no challenge was sent
        before it."""
        hello, self._hello = self._hello, None
        if hello is None or self._key is None:
            raise UnknownPeer("a proof without a challenge")
        if not self._key.proves(proof.proof, "frontend", self._nonce, hello.nonce):
            raise UnknownPeer("the frontend does not know the fleet's key, or uses another one")
        return hello
