"""Refuses to serve clients of other hosts without API keys, unless `--insecure` is given."""

import socket
from ipaddress import ip_address

from controller.frontend.settings import FrontendSettings
from events.errors import BadSetting


def check_open_port(settings: FrontendSettings) -> None:
    """Raise BadSetting if clients of other hosts could use the API without a key."""
    if settings.api_key_file or settings.insecure or is_loopback(settings.host):
        return
    raise BadSetting(
        f"the host {settings.host} lets clients of other hosts use the API without a key. Give --api-key-file FILE "
        "(docs/operations/security.md), listen on 127.0.0.1 behind a proxy that authenticates, or give --insecure"
    )


def is_loopback(host: str) -> bool:
    """Return whether an address, or every address of a name, is reachable from this host only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host or None, None, flags=0 if host else socket.AI_PASSIVE)
    except OSError:
        return False
    return all(ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
