"""Flags of `holdfast up` for webhooks, and their translation to the notifier's settings."""

import argparse
import json
from collections.abc import Mapping, Sequence

from controller.processes.flag_types import Options, option
from events.errors import UsageError
from events.json_types import Json

VARIABLE = "HOLDFAST_NOTIFIER__WEBHOOKS"
NONE = "-"
EACH: Options = {"action": "append", "default": []}
TEMPLATES = ("cloudevents", "slack", "pagerduty")
FLAGS: Mapping[str, Options] = {
    "--webhook": option("URL to send events to (docs/guides/webhooks.md), or @FILE for a file that contains it; repeatable",
        metavar="[NAME=]URL", **EACH),
    "--webhook-kinds": option(
        "kinds of events to send (docs/reference/events.md), or all; once for all webhooks, or once for each "
        "(default: those that need attention)", metavar="K,K", **EACH),
    "--webhook-template": option("format of the requests; once for all webhooks, or once for each (default: cloudevents)",
        choices=TEMPLATES, **EACH),
    "--webhook-secret-file": option(
        f"file with the secret (whsec_…) or PagerDuty's routing key; once for all or for each webhook, {NONE}: none",
        metavar="FILE", **EACH),
}  # fmt: skip


def has_notifier(args: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Return whether the fleet has a notifier, because a flag or the environment sets a webhook."""
    return bool(args.webhook or environment.get(VARIABLE))


def webhook_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return the flags for webhooks as an environment variable of the notifier; empty without a webhook.

    Raise UsageError if the flags contradict one another."""
    if not args.webhook:
        if args.webhook_kinds or args.webhook_template or args.webhook_secret_file:
            raise UsageError(
                "--webhook-kinds, --webhook-template and --webhook-secret-file require --webhook URL"
            )
        return {}
    from controller.webhooks.settings import named

    kinds = _each("--webhook-kinds", args.webhook_kinds, args.webhook)
    templates = _each("--webhook-template", args.webhook_template, args.webhook)
    secrets = _each("--webhook-secret-file", args.webhook_secret_file, args.webhook)
    webhooks = []
    for text, own_kinds, template, secret in zip(args.webhook, kinds, templates, secrets, strict=True):
        name, url = named(text)
        one: Json = {"url": url, "name": name, "template": template or TEMPLATES[0]}
        one["kinds"] = [kind for kind in (own_kinds or "").split(",") if kind]
        one["secret_file"] = "" if secret in (None, NONE) else secret
        webhooks.append(one)
    return {VARIABLE: json.dumps(webhooks)}


def check_webhooks(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Raise UsageError or BadSetting if the flags or the environment have values that the notifier would reject."""
    from controller.config.flags import gather
    from controller.webhooks.settings import NotifierSettings

    variables = webhook_variables(args)
    if has_notifier(args, environment):
        gather(NotifierSettings, "notifier", {}, {**environment, **variables}).check()


def _each(flag: str, given: Sequence[str], webhooks: Sequence[str]) -> Sequence[str | None]:
    if len(given) not in (0, 1, len(webhooks)):
        raise UsageError(
            f"{flag} is given {len(given)} times, --webhook {len(webhooks)} times: give it once for all, or once for each"
        )
    return [*given] if len(given) == len(webhooks) else [given[0] if given else None] * len(webhooks)
