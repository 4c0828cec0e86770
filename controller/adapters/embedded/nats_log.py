"""What does a nats-server's log say since the last look? Whom it has refused, and what."""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from controller.adapters.embedded.server import EmbeddedServer

STRANGER = "a stranger"
REFUSAL = b"[ERR]"  # a line that tells of one says so
TRIED_MAX = 200  # characters of a subject: whoever tries chooses it
# Who tries also chooses what stands before: his client's name. What the server itself adds stands last, and no subject has
# a blank in it.
_VIOLATION = re.compile(
    rb'.* - "[^" /]*/nkey:(U[A-Z2-7]{55})" - (Publish|Subscription) Violation - (?:\S+ )*?Subject "(\S*?)"(?:, SID \S+)?$'
)
_UNKNOWN = re.compile(rb'.* - authentication error(?: - (?:Nkey|User) "\S*")?$')
# Whose connection the server has cut while it read its users anew: he is let in when he comes again.
_CUT = re.compile(rb'.* - Problem registering with account "\S*": connection closed$')
_WHOSE = re.compile(rb"\S+ \S+ \S+ \[ERR\] (\S+ - cid:[0-9]+) - ")


class LogTail:
    """The part of a server's log that nobody has looked at."""

    def __init__(self) -> None:
        self._pid = 0
        self._read = 0  # bytes of the log of this life

    def news(self, server: EmbeddedServer) -> bytes:
        """Return what the log says since the last look. Raise OSError."""
        with server.log.open("rb") as log:
            if server.pid != self._pid:  # what came before this life is no news
                self._pid, self._read = server.pid, log.seek(0, os.SEEK_END)
            self._read = min(self._read, log.seek(0, os.SEEK_END))  # it may have been begun anew
            log.seek(self._read)
            said = log.read()
        self._read += len(said)
        return said


@dataclass(frozen=True, slots=True)
class Refused:
    """What the broker has refused somebody since the last look."""

    who: str  # a user, or `STRANGER`
    tried: str  # the first thing
    times: int


def refusals(said: bytes, names: Mapping[str, str]) -> list[Refused]:
    """Return what a log tells of refusals, one entry for each user. `names` are the users', by their public keys."""
    first: dict[str, str] = {}
    times: Counter[str] = Counter()
    cut: set[bytes] = set()  # connections
    for line in said.splitlines():
        whose = _WHOSE.match(line)
        if whose and _CUT.match(line):
            cut.add(whose[1])
            continue
        if found := _VIOLATION.match(line):
            who = names.get(found[1].decode(), STRANGER)
            verb = "publish to" if found[2] == b"Publish" else "subscribe to"
            tried = f"{verb} {found[3].decode(errors='replace')[:TRIED_MAX]}"
        elif _UNKNOWN.match(line) and not (whose and whose[1] in cut):
            who, tried = STRANGER, "connect"
        else:
            continue
        first.setdefault(who, tried)
        times[who] += 1
    return [Refused(who, tried, times[who]) for who, tried in first.items()]
