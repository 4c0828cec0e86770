"""What does a request's head say of how it wants to be let in? Read only where requests are let in by their deadlines.

    X-Holdfast-TTFT-Deadline-Ms, x-llm-d-slo-ttft-ms             milliseconds from its arrival to its first token
    X-Holdfast-Queue-TTL-Ms, x-llm-d-inference-ttl (1.5s)        the most that it wants to stand in line
    X-Holdfast-Client, x-llm-d-inference-fairness-id             whose it is: among those of a tier workers are shared fairly
    X-Stainless-Retry-Count                                      how often OpenAI's client has asked before

Of two that mean the same ours holds. A header that makes no sense is refused: one that is silently not heeded is worse.
"""

import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b

import msgspec

from controller.frontend.errors import ApiError, invalid
from controller.frontend.settings import FairnessKey

DEADLINE = ("x-holdfast-ttft-deadline-ms", "x-llm-d-slo-ttft-ms")
LINE = ("x-holdfast-queue-ttl-ms", "x-llm-d-inference-ttl")
CLIENT = ("x-holdfast-client", "x-llm-d-inference-fairness-id")
RETRIES = "x-stainless-retry-count"
SHOWN = {
    DEADLINE[0]: "X-Holdfast-TTFT-Deadline-Ms",
    LINE[0]: "X-Holdfast-Queue-TTL-Ms",
    CLIENT[0]: "X-Holdfast-Client",
    RETRIES: "X-Stainless-Retry-Count",
}
MS_MAX = 86_400_000.0
CLIENT_CHARS_MAX = 128
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(h|ms|m|s|us|µs|ns)")


class AdmissionHeaders(msgspec.Struct, frozen=True):
    """What a head has said. Seconds."""

    header: str = ""  # whose it is, by the header for it
    api_key: str = ""  # or by the key that it came with: a digest
    deadline_s: float | None = None
    line_s: float | None = None
    retries: int = 0

    def client(self, by: Iterable[FairnessKey], user: str) -> str:
        """Return whose a request is, by the first of these that it has; empty: everybody's who says nothing."""
        given: Mapping[FairnessKey, str] = {"header": self.header, "api_key": self.api_key, "user": user}
        return next((f"{kind}:{given[kind]}" for kind in by if given[kind]), "")


NOTHING = AdmissionHeaders()


def read_admission(headers: Iterable[tuple[bytes, bytes]]) -> AdmissionHeaders:
    """Return what a request with these headers says. Raise ApiError (400), naming the header."""
    found: dict[str, str] = {}
    for raw, value in headers:
        name = raw.decode("latin-1").lower()
        if name in _READ:
            if name in found and name != "authorization":
                raise invalid(f"the header {_shown(name)} is given more than once", _shown(name))
            found[name] = value.decode("latin-1").strip()
    if not found:
        return NOTHING
    key = found.get("authorization", "").partition(" ")[2].strip()
    return AdmissionHeaders(
        _client(found),
        blake2b(key.encode(), digest_size=8).hexdigest() if key else "",
        _milliseconds(found, DEADLINE),
        _line_s(found),
        _retries(found),
    )


_READ = frozenset((*DEADLINE, *LINE, *CLIENT, RETRIES, "authorization"))


def _shown(name: str) -> str:
    return SHOWN.get(name, name)


def _refused(name: str, value: str, wanted: str) -> ApiError:
    text = "".join(c for c in value[:40] if c.isprintable())
    return invalid(f"the header {_shown(name)} is {text!r}: {wanted} is wanted", _shown(name))


def _client(found: Mapping[str, str]) -> str:
    for name in CLIENT:
        if given := found.get(name):
            if len(given) > CLIENT_CHARS_MAX:
                raise _refused(name, given, f"a name of {CLIENT_CHARS_MAX} characters at most")
            return given
    return ""


def _milliseconds(found: Mapping[str, str], names: Iterable[str]) -> float | None:
    for name in names:
        if (given := found.get(name)) is not None:
            try:
                value = float(given)
            except ValueError:
                value = -1.0
            if not 0 < value <= MS_MAX:
                raise _refused(name, given, f"a number of milliseconds above 0, {MS_MAX:.0f} at most,")
            return value / 1000
    return None


def _line_s(found: Mapping[str, str]) -> float | None:
    ours, theirs = LINE
    if ours in found:
        return _milliseconds(found, (ours,))
    if (given := found.get(theirs)) is None:
        return None
    seconds = go_duration(given)
    if seconds is None or not 0 <= seconds <= MS_MAX / 1000:
        raise _refused(theirs, given, "a duration such as 1.5s or 1500ms")
    return seconds or None  # 0 is llm-d's word for none


def _retries(found: Mapping[str, str]) -> int:
    given = found.get(RETRIES, "0")
    if not given.isascii() or not given.isdigit():
        raise _refused(RETRIES, given, "a number")
    return min(int(given[:9]), 1_000_000)


def go_duration(text: str) -> float | None:
    """Return the seconds of a duration as Go writes it (`1m30s`, `1.5s`, `250ms`); None if it is none."""
    if text == "0":
        return 0.0
    seconds, at = 0.0, 0
    for part in _PART.finditer(text):
        if part.start() != at:
            return None
        seconds += float(part[1]) * _UNITS_S[part[2]]
        at = part.end()
    return seconds if at == len(text) and at else None
