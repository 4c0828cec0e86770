"""Settings of the notifier: webhooks, templates and retries."""

import base64
import binascii
import hashlib
import re
import socket
from collections import Counter
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from controller.setting_types import Positive, Strict
from events import codec
from events.errors import BadSetting

PREFIX = "whsec_"
KEY_MIN, KEY_MAX = 24, 64  # bytes, as in Standard Webhooks
FILE_MAX = 64 * 1024
KEYS_MAX = 8
MAKES_ONE = f'`echo "{PREFIX}$(head -c 32 /dev/urandom | base64)"` generates one'
ROUTING_KEY = re.compile(r"[A-Za-z0-9]{32}")


def read_secret(file: Path) -> str:
    """Return the text of a secret file. Raise ValueError with the reason if it cannot be read."""
    try:
        with file.open("rb") as opened:
            text = opened.read(FILE_MAX).decode("ascii").strip()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not a secret file: secrets are ASCII text") from None
    if not text:
        raise ValueError(f"{file} is empty")
    return text


def keys_of(text: str) -> list[bytes]:
    """Return the signing keys in a secret file's text, one per line. Raise ValueError for an invalid line."""
    found = [_key(line.strip(), number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not 0 < len(found) <= KEYS_MAX:
        raise ValueError(f"it has {len(found)} keys: it must have 1 to {KEYS_MAX}, one per line")
    return found


def _key(line: str, number: int) -> bytes:
    try:
        key = base64.b64decode(line.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not line.startswith(PREFIX) or not KEY_MIN <= len(key) <= KEY_MAX:
        raise ValueError(
            f"line {number} is not a key: it must be {PREFIX} and {KEY_MIN} to {KEY_MAX} bytes in base64; {MAKES_ONE}"
        )
    return key


def routing_key(text: str) -> str:
    """Return the PagerDuty routing key in a secret file's text. Raise ValueError if the text is not a routing key."""
    if not ROUTING_KEY.fullmatch(text):
        raise ValueError(
            "it is not a PagerDuty routing key: the file must hold only its 32 letters and digits"
        )
    return text


METADATA_HOSTS = ("metadata.google.internal", "metadata.goog", "metadata")
NETWORKS: tuple[IPv4Network | IPv6Network, ...] = (
    IPv4Network("169.254.0.0/16"),  # link-local; metadata of AWS, Azure, Google Cloud, Oracle
    IPv4Network("100.100.100.200/32"),  # metadata of Alibaba Cloud
    IPv6Network("fe80::/10"),
    IPv6Network("fd00:ec2::/32"),  # metadata of AWS
    IPv6Network("fd20:ce::/32"),  # metadata of Google Cloud
)
_NAT64 = IPv6Network("64:ff9b::/96")


class LinkLocalRefused(OSError):
    """A host name resolves to a link-local or metadata address."""


def refusal(host: str) -> str:
    """Return why no webhook may be sent to a host, given as an address or a name; "" if it is allowed."""
    name = host.rstrip(".").lower()
    if name in METADATA_HOSTS:
        return f"{host} is a cloud's metadata service"
    address = _address(name)
    if address is not None and any(address in network for network in NETWORKS):
        return f"{host} is a link-local or metadata address"
    return ""


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address that a host string denotes; None if the string is a name.

    An address may be written as a number, and an IPv4 address may be embedded in an IPv6 address.
    """
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        try:
            return IPv4Address(socket.inet_aton(host))  # 2852039166, 0xa9fea9fe, 169.254.43518
        except (OSError, UnicodeError):
            return None
    if not isinstance(found, IPv6Address):
        return found
    translated = IPv4Address(int(found) & 0xFFFFFFFF) if found in _NAT64 else found
    return found.ipv4_mapped or found.sixtofour or translated


DEFAULT_KINDS = (
    "incident_opened",
    "incident_closed",
    "breaker_opened",
    "degradation_changed",
    "spare_activated",
    "golden_disputed",
    "exposure_unknown",
    "panic_began",
    "panic_ended",
    "observer_blind",
    "worker_lingered",
    "intrusion_refused",
)
"""The default kinds. An incident is about a worker that is suspicious, convicted, broken or dead, or about a model with too
little capacity. It closes when the worker or model is healthy again, or the worker is gone for good."""
ALL = "all"


def checked(kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the event kinds that `kinds` selects. Raise ValueError for an unknown kind.

    An empty `kinds` stands for the default kinds, and "all" stands for every kind.
    """
    wanted = tuple(dict.fromkeys(kinds))
    if wanted == (ALL,):
        return tuple(sorted(codec.KINDS))
    for name in wanted:
        if name not in codec.KINDS:
            near = get_close_matches(name, codec.KINDS, n=3, cutoff=0.5)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(f"unknown kind {name!r}: {meant}docs/reference/events.md lists all kinds")
    return wanted or DEFAULT_KINDS


TemplateName = Literal["cloudevents", "slack", "pagerduty"]
WEBHOOKS_MAX = 32
_NAMED = re.compile(r"([A-Za-z0-9_-]{1,40})=(.+)", re.DOTALL)
_NAME = r"^[A-Za-z0-9_-]{0,40}$"


class Webhook(Strict):
    """One webhook. Its URL may itself be a secret: `@FILE` names a file that contains it."""

    url: str = Field(repr=False)
    name: Annotated[str, Field(pattern=_NAME)] = ""
    kinds: Annotated[tuple[str, ...], AfterValidator(checked)] = Field((), validate_default=True)
    template: TemplateName = "cloudevents"
    secret_file: str = ""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.template == "pagerduty" and not self.secret_file:
            raise ValueError("the template pagerduty needs a secret file: the one with the routing key")
        self.address  # noqa: B018 (rejects an invalid URL)
        return self

    @cached_property
    def address(self) -> str:
        """The webhook's URL, read from its file if `url` is `@FILE`.

        Raise ValueError if the URL is invalid, or if its file cannot be read.
        """
        url = read_secret(Path(self.url[1:])) if self.url.startswith("@") else self.url
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is not a number
            good = False
        if not good or not url.isprintable() or " " in url:
            shown = f"the content of {self.url[1:]}" if self.url.startswith("@") else repr(self.url)
            raise ValueError(f"{shown} is not a webhook URL, such as https://host/path")
        return url

    @cached_property
    def called(self) -> str:
        """The webhook's name in metrics, logs and the broker's consumer: the configured name, or host and digest of the URL."""
        host = re.sub(r"[^A-Za-z0-9-]", "-", urlsplit(self.address).hostname or "")[:30]
        return self.name or f"{host}-{hashlib.sha256(self.address.encode()).hexdigest()[:8]}"

    @property
    def durable(self) -> str:
        """The name of the webhook's durable consumer at the broker."""
        return f"webhook-{self.called}"

    def secret(self) -> str:
        """Return the content of the secret file; "" if none is configured.

        Raise ValueError if the file cannot be read, or if its content is not valid for the template.
        """
        text = read_secret(Path(self.secret_file)) if self.secret_file else ""
        if text:
            try:
                _ = routing_key(text) if self.template == "pagerduty" else keys_of(text)
            except ValueError as error:
                raise ValueError(f"{self.secret_file}: {error}") from None
        return text


class NotifierSettings(Strict):
    """Settings of the notifier."""

    webhooks: tuple[Webhook, ...] = Field(
        (), description="JSON list of objects with url and, optionally, name, kinds, template, secret_file"
    )
    fleet: Annotated[str, Field(min_length=1, max_length=100)] = Field(
        "holdfast", description="name of this fleet in messages and in PagerDuty's dedup_key"
    )
    runbooks_url: str = Field(
        "", description="URL of the folder docs/operations/runbooks, for links; empty: no links"
    )
    console_url: str = Field("", description="URL of a console or dashboard, for links; empty: no link")
    timeout_s: Positive = Field(10.0, description="seconds to wait for a receiver's response")
    tries_max: Annotated[int, Field(ge=1, le=1_000)] = Field(
        8, description="tries of a refused event before it goes to the dead letters"
    )
    hold_s: Annotated[float, Field(ge=0, le=1e9)] = Field(
        86_400.0, description="age in seconds at which an event is given up while its receiver is away"
    )
    wait_min_s: Positive = Field(
        1.0, description="seconds before the second try; the wait doubles, with jitter"
    )
    wait_max_s: Positive = Field(
        60.0, description="longest wait between tries in seconds, unless Retry-After is longer"
    )
    allow_link_local: bool = Field(
        False,
        description="allow link-local addresses, where clouds serve an account's credentials",
    )
    admin_host: str = Field("127.0.0.1", description="address of /metrics, /health and /ready")
    admin_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description="port of /metrics, /health and /ready; 0: any free port"
    )

    @model_validator(mode="after")
    def _make_sense(self) -> Self:
        if len(self.webhooks) > WEBHOOKS_MAX:
            raise ValueError(f"{len(self.webhooks)} webhooks: at most {WEBHOOKS_MAX} are allowed")
        names = Counter(webhook.called for webhook in self.webhooks)
        if twice := next((name for name, times in names.items() if times > 1), ""):
            raise ValueError(f"two webhooks are named {twice!r}: give each its own name")
        for webhook in self.webhooks:
            why = refusal(urlsplit(webhook.address).hostname or "")
            if why and not self.allow_link_local:
                raise ValueError(f"the webhook {webhook.called}: {why}; allow_link_local permits it")
        if self.wait_min_s > self.wait_max_s:
            raise ValueError(
                "tries_max and wait_min_s must be above 0, wait_max_s at least wait_min_s, and hold_s at least 0"
            )
        return self

    def check(self) -> None:
        """Raise BadSetting if no webhook is configured, or if a secret cannot be read.

        Called at the start, because at run time an unreadable secret only makes the notifier retry.
        """
        if not self.webhooks:
            raise BadSetting(
                "the notifier needs HOLDFAST_NOTIFIER__WEBHOOKS, or --webhooks: see docs/guides/webhooks.md"
            )
        for webhook in self.webhooks:
            try:
                webhook.secret()
            except ValueError as error:
                raise BadSetting(f"the secret of the webhook {webhook.called}: {error}") from error


def named(text: str) -> tuple[str, str]:
    """Split `NAME=URL` into name and URL. The name is empty if the text is only a URL."""
    found = _NAMED.fullmatch(text)
    return (found[1], found[2]) if found else ("", text)
