"""Does whoever is at the other end of a connection belong to this fleet? He does if he knows its key.

    frontend ── Hello(nonce) ──▶ worker
    frontend ◀── Challenge(nonce, proof) ── worker      it is no stranger who has taken a port that was free
    frontend ── Proof ──▶ worker                        nor is who asks
    frontend ◀── Welcome ── worker

Once for each connection, before anything of a user's is said. A proof is an HMAC-SHA256 (RFC 2104) of who proves what to whom
and of both sides' fresh nonces, so that none can be used twice. Without a key nothing is proved, and nothing asked.

What a reader would get wrong: this is no encryption. Whoever can read what passes between two hosts reads it.
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


class Stranger(HoldfastError):
    """Whoever is at the other end does not know the fleet's key."""


class FleetKey:
    """A secret that all processes of a fleet share. It shows itself to nobody."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def read(cls, path: Path) -> "FleetKey":
        """Return the key that a file holds, without spaces around it. Raise BadSetting."""
        try:
            with path.open("rb") as file:
                secret = file.read(KEY_BYTES_MAX + 1).strip()
        except OSError as error:
            raise BadSetting(f"fleet_key_file = {str(path)!r}: {error.strerror}") from error
        if not KEY_BYTES_MIN <= len(secret) <= KEY_BYTES_MAX:
            raise BadSetting(
                f"fleet_key_file = {str(path)!r} holds {len(secret)} bytes: {KEY_BYTES_MIN} to {KEY_BYTES_MAX} are wanted"
            )
        return cls(secret)

    @classmethod
    def kept(cls, path: Path) -> "FleetKey":
        """Return the key that a file holds, or a new one, which it holds from then on, for its owner alone. Raise BadSetting,
        or OSError if it cannot be written."""
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

    def proof(self, who: str, *said: bytes) -> bytes:
        """Return the proof that `who` knows the key, for this exchange: each part of it with its length before it."""
        parts = [b"holdfast 1", who.encode(), *said]
        words = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(self._secret, words, "sha256")

    def proves(self, proof: bytes, who: str, *said: bytes) -> bool:
        """Say whether a proof is one, in a time that does not tell how nearly."""
        return hmac.compare_digest(proof, self.proof(who, *said))


def file_of(named: str, own: Path) -> str:
    """Return the file of a fleet's key: the one that is named, or its own, which is made if need be. Raise BadSetting or
    OSError."""
    path = Path(named) if named else own
    (FleetKey.read if named else FleetKey.kept)(path)
    return str(path.resolve())


def nonce() -> bytes:
    """Return what nobody has said before."""
    return secrets.token_bytes(NONCE_BYTES)


class FrontendHandshake:
    """The frontend's side of one connection's beginning."""

    def __init__(self, key: FleetKey | None) -> None:
        self._key = key
        self._nonce = nonce() if key is not None else b""
        self.proven = key is None  # nothing has to be proved, or the worker has

    def hello(self, frontend: str) -> Hello:
        """Return what the frontend says first."""
        return Hello(frontend, nonce=self._nonce)

    def answer(self, challenge: Challenge) -> Proof:
        """Return what proves that we know the key, to a worker that does. Raise Stranger."""
        if self._key is None:
            raise Stranger("the worker asks for its fleet's key: name it by --fleet-key-file")
        if not self._key.proves(challenge.proof, "worker", self._nonce, challenge.nonce):
            raise Stranger("the worker does not know the fleet's key, or knows another one")
        self.proven = True
        return Proof(self._key.proof("frontend", challenge.nonce, self._nonce))


class WorkerHandshake:
    """The worker's side: it answers a hello at once where there is no key."""

    def __init__(self, key: FleetKey | None) -> None:
        self._key = key
        self._nonce = b""
        self._hello: Hello | None = None

    def challenge(self, hello: Hello) -> Challenge | None:
        """Return what a frontend is asked before it is welcome; None: nothing."""
        if self._key is None:
            return None
        self._hello, self._nonce = hello, nonce()
        if len(hello.nonce) != NONCE_BYTES:  # it knows of no key: it will say so, and is told nothing
            return Challenge(self._nonce)
        return Challenge(self._nonce, self._key.proof("worker", hello.nonce, self._nonce))

    def proven(self, proof: Proof) -> Hello:
        """Return the hello of a frontend that knows the key. Raise Stranger."""
        hello, self._hello = self._hello, None
        if hello is None or self._key is None:
            raise Stranger("a proof that nobody has asked for")
        if not self._key.proves(proof.proof, "frontend", self._nonce, hello.nonce):
            raise Stranger("the frontend does not know the fleet's key, or knows another one")
        return hello
