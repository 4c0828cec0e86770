"""Protects admin ports against requests that another site's page makes through an operator's browser.

    Host is another name than this host's (DNS rebinding) ──▶ refused
    from a page of another origin (Sec-Fetch-Site, Origin) ──▶ refused
    changes something ──▶ only from this host, or with an admin key

Each line has a property of a request, and what happens to the request. Addresses, `localhost` and this host's own name are
always accepted as Host. HOLDFAST_ADMIN_HOSTS lists further names, separated by commas, such as those that Prometheus uses for a
container. `.example.org` stands for all names below that domain.
"""

import os
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

VARIABLE = "HOLDFAST_ADMIN_HOSTS"
OWN_SITES = ("same-origin", "none")  # none: the operator typed the URL, or used a bookmark
READING = ("GET", "HEAD")
QUOTED_CHARS_MAX = 100


def own_hosts(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the names under which this host's admin ports may be reached: this host's name and those in HOLDFAST_ADMIN_HOSTS."""
    listed = (name.strip().lower().rstrip(".") for name in environment.get(VARIABLE, "").split(","))
    return frozenset((socket.gethostname().lower(), *filter(None, listed)))


def refusal(headers: Mapping[str, str], hosts: frozenset[str]) -> str:
    """Return why a request with these headers is refused. Return an empty string if it is accepted. `hosts` is the result of
    `own_hosts`."""
    host = headers.get("Host", "")
    if not _is_own(host, hosts):
        shown = host if len(host) <= QUOTED_CHARS_MAX else host[:QUOTED_CHARS_MAX] + "…"
        known = ", ".join(sorted(hosts))
        return f"this port accepts addresses, localhost and {known} as Host, not {shown!r} ({VARIABLE} lists more names)"
    if headers.get("Sec-Fetch-Site", "none") not in OWN_SITES:
        return "the request comes from a page of another origin"
    origin = headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return "the request comes from a page of another origin: its Origin is not this port's"
    return ""


def is_local(peer: object, own: object) -> bool:
    """Return whether a connection comes from this host. `peer` and `own` are the socket addresses of its two ends."""
    ends = [end[0].partition("%")[0] if isinstance(end, tuple) and end else "" for end in (peer, own)]
    try:
        address = ip_address(ends[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback or ends[0] == ends[1]


def _is_own(host: str, hosts: frozenset[str]) -> bool:
    if not host:
        return True  # an HTTP/1.0 client; browsers always send Host
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name in hosts or name == "localhost" or any(one[0] == "." and name.endswith(one) for one in hosts):
        return True
    try:
        return bool(ip_address(name))
    except ValueError:
        return False
