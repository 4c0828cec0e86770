"""Reads new lines of a nats-server's log, and finds the requests that the server has refused."""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from controller.adapters.embedded.server import EmbeddedServer

STRANGER = "a stranger"
REFUSAL = b"[ERR]"  # every line about a refusal contains it
TRIED_MAX = 200  # subjects are truncated to this number of characters, because the client chooses them
# The client also chooses its name, which is at the start of the line. The patterns therefore match the server's own words at the
# end of the line. No subject contains a blank.
_VIOLATION = re.compile(
    rb'.* - "[^" /]*/nkey:(U[A-Z2-7]{55})" - (Publish|Subscription) Violation - (?:\S+ )*?Subject "(\S*?)"(?:, SID \S+)?$'
)
_UNKNOWN = re.compile(rb'.* - authentication error(?: - (?:Nkey|User) "\S*")?$')
# The server closed this connection while it reloaded its users, so that is not a refusal. The client can reconnect.
_CUT = re.compile(rb'.* - Problem registering with account "\S*": connection closed$')
_CONNECTION = re.compile(rb"\S+ \S+ \S+ \[ERR\] (\S+ - cid:[0-9]+) - ")


class LogTail:
    """Reads the lines that a server has logged since the last read."""

    def __init__(self) -> None:
        self._pid = 0
        self._read = 0  # position in the log up to which it was read

    def news(self, server: EmbeddedServer) -> bytes:
        """Return the bytes that the server has logged since the last call. Raise OSError if the log cannot be read.

        The first call for a server process returns no bytes.
        """
        with server.log.open("rb") as log:
            if server.pid != self._pid:  # skip lines of earlier processes
                self._pid, self._read = server.pid, log.seek(0, os.SEEK_END)
            self._read = min(self._read, log.seek(0, os.SEEK_END))  # the log may have been truncated
            log.seek(self._read)
            said = log.read()
        self._read += len(said)
        return said


@dataclass(frozen=True, slots=True)
class Refused:
    """The requests of one client that the broker refused, as counted by `refusals`."""

    client: str  # the user's name, or `STRANGER`
    tried: str  # a text about the first refused request
    times: int  # number of refusals


def refusals(said: bytes, names: Mapping[str, str]) -> list[Refused]:
    """Find the requests that the broker refused, in the log lines `said`, and return one entry per client.

    `names` maps public keys to users' names.
    """
    first: dict[str, str] = {}
    times: Counter[str] = Counter()
    cut: set[bytes] = set()  # connections
    for line in said.splitlines():
        connection = _CONNECTION.match(line)
        if connection and _CUT.match(line):
            cut.add(connection[1])
            continue
        if found := _VIOLATION.match(line):
            client = names.get(found[1].decode(), STRANGER)
            verb = "publish to" if found[2] == b"Publish" else "subscribe to"
            tried = f"{verb} {found[3].decode(errors='replace')[:TRIED_MAX]}"
        elif _UNKNOWN.match(line) and not (connection and connection[1] in cut):
            client, tried = STRANGER, "connect"
        else:
            continue
        first.setdefault(client, tried)
        times[client] += 1
    return [Refused(client, tried, times[client]) for client, tried in first.items()]
