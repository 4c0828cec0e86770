"""How one upstream is reached: TLS, additional HTTP headers, and a proxy."""

from pathlib import Path

import msgspec

TLS_FILES = ("ca_file", "cert_file", "key_file")


class UpstreamTls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the connections to one upstream are encrypted and authenticated. The files are read again when they change."""

    ca_file: str = ""  # PEM file with the certificates to trust; empty: those of the system
    cert_file: str = ""  # PEM file with the client certificate and its chain
    key_file: str = ""  # PEM file with the client certificate's private key; empty: it is in `cert_file`
    server_name: str = ""  # name for SNI and for the check of the certificate; empty: the host of `url`
    verify: bool = True  # false: accept any certificate


class UpstreamRoute(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the connections to one upstream, which can change while its worker runs."""

    tls: UpstreamTls = UpstreamTls()
    headers: dict[str, str] = {}  # HTTP headers to add to each request
    proxy: str = ""  # URL of an HTTP proxy; empty: connect directly

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"  # headers and the proxy's URL may be secrets


class LiveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an upstream that can change while its worker runs."""

    route: UpstreamRoute
    key_file: Path | None
    weight: float
    requests_max: int | None  # maximum of requests at the upstream; None: that of the worker's start
