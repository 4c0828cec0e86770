"""Settings of the notifier: webhooks, templates and retries."""

import hashlib
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from controller.setting_types import Positive, Strict
from controller.webhooks import secrets
from controller.webhooks.kinds import checked
from controller.webhooks.link_local import refusal
from controller.webhooks.retry_policy import RetryPolicy
from events.errors import BadSetting

TemplateName = Literal["cloudevents", "slack", "pagerduty"]
WEBHOOKS_MAX = 32
_NAMED = re.compile(r"([A-Za-z0-9_-]{1,40})=(.+)", re.DOTALL)
_NAME = r"^[A-Za-z0-9_-]{0,40}$"


class Webhook(Strict):
    """One webhook. Its URL may itself be a secret: `@FILE` names a file that contains it."""

    url: str = Field(repr=False)
    name: Annotated[str, Field(pattern=_NAME)] = ""
    kinds: tuple[str, ...] = Field((), validate_default=True)
    template: TemplateName = "cloudevents"
    secret_file: str = ""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.template == "pagerduty" and not self.secret_file:
            raise ValueError("the template pagerduty needs a secret file: the one with the routing key")
        self.address  # noqa: B018 (rejects an invalid URL)
        return self

    @field_validator("kinds")
    @classmethod
    def _are_kinds(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        return checked(kinds)

    @cached_property
    def address(self) -> str:
        """The URL itself. Raise ValueError if it is invalid, or its file cannot be read."""
        url = secrets.read_secret(Path(self.url[1:])) if self.url.startswith("@") else self.url
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
        """The webhook's name in metrics, logs and the broker's consumer: as configured, or its host and a digest of its URL."""
        host = re.sub(r"[^A-Za-z0-9-]", "-", urlsplit(self.address).hostname or "")[:30]
        return self.name or f"{host}-{hashlib.sha256(self.address.encode()).hexdigest()[:8]}"

    @property
    def durable(self) -> str:
        """The name of the webhook's durable consumer at the broker."""
        return f"webhook-{self.called}"

    def secret(self) -> str:
        """Return the content of the secret file, empty without one. Raise ValueError if it is invalid for the template."""
        text = secrets.read_secret(Path(self.secret_file)) if self.secret_file else ""
        if text:
            try:
                _ = secrets.routing_key(text) if self.template == "pagerduty" else secrets.keys_of(text)
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
        if twice := _twice(webhook.called for webhook in self.webhooks):
            raise ValueError(f"two webhooks are named {twice!r}: give each its own name")
        for webhook in self.webhooks:
            why = refusal(urlsplit(webhook.address).hostname or "")
            if why and not self.allow_link_local:
                raise ValueError(f"the webhook {webhook.called}: {why}; allow_link_local permits it")
        self.policy()
        return self

    def check(self) -> None:
        """Raise BadSetting if there is no webhook, or a secret cannot be read. At run time the notifier would only wait."""
        if not self.webhooks:
            raise BadSetting(
                "the notifier needs HOLDFAST_NOTIFIER__WEBHOOKS, or --webhooks: see docs/guides/webhooks.md"
            )
        for webhook in self.webhooks:
            try:
                webhook.secret()
            except ValueError as error:
                raise BadSetting(f"the secret of the webhook {webhook.called}: {error}") from error

    def policy(self) -> RetryPolicy:
        """Return the retry policy."""
        return RetryPolicy(
            tries_max=self.tries_max,
            hold_s=self.hold_s,
            wait_min_s=self.wait_min_s,
            wait_max_s=self.wait_max_s,
        )


def named(text: str) -> tuple[str, str]:
    """Split `NAME=URL` into name and URL; the name is empty for a URL alone."""
    found = _NAMED.fullmatch(text)
    return (found[1], found[2]) if found else ("", text)


def _twice(names: Iterable[str]) -> str:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), "")  # type: ignore[func-returns-value]
