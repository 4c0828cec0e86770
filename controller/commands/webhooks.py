"""`holdfast webhooks`: tests a webhook, lists dead letters, or sends dead letters again.

A dead letter is an event that a webhook did not accept. A wrong URL can be the reason, so `resend` takes the URL from its
arguments.
"""

import argparse
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from controller.adapters.clock import SystemClock
from controller.config.flags import describe
from controller.processes.operator_client import closing, find
from controller.replay.sentences import count
from controller.terminal_text import fitted
from controller.webhooks import cloud_event, templates
from controller.webhooks.retry_policy import Answer, is_away
from controller.webhooks.settings import NotifierSettings, Webhook, named
from events import codec, subjects
from events.dead_letters import DeadLetter, DeadLetters
from events.decisions import IncidentClosed, IncidentOpened
from events.errors import BadSetting, HoldfastError
from events.follow import FollowedEvent
from events.journal.broker import BrokerRefused
from events.nats.connection import BrokerConnection
from events.process.imports import without_ca_certificates

REACH_S = 3.0  # timeout in seconds for connecting to the broker
SAMPLE = "incident-0"  # id of the incident in sample events


def _webhook(args: argparse.Namespace) -> tuple[Webhook, str, NotifierSettings]:
    """Return the webhook that the arguments describe, the webhook's secret, and the notifier's settings.

    Raise BadSetting if a setting or the secret is invalid."""
    from controller.config.flags import gather

    try:
        webhook = Webhook(url=named(args.url)[1], template=args.template, secret_file=args.secret_file)
    except ValidationError as error:
        raise BadSetting(describe(error, "webhook")) from error
    try:
        return webhook, webhook.secret(), gather(NotifierSettings, "notifier", {})
    except ValueError as error:
        raise BadSetting(f"invalid secret of the webhook: {error}") from error


# --- test -------------------------------------------------------------------------------------------------------------


def samples(template: str, now: datetime) -> list[FollowedEvent]:
    """Return the sample events that are sent to test a webhook.

    The first event opens an incident. For PagerDuty, a second event closes the incident, so that no alert stays open."""
    opened = IncidentOpened(
        decided_at=now, incident=SAMPLE, subject="worker:w0", symptom="this is a test: nothing has happened"
    )
    closed = IncidentClosed(decided_at=now, incident=SAMPLE, subject="worker:w0", outcome="the test is over")
    facts = [opened, closed] if template == "pagerduty" else [opened]
    return [
        FollowedEvent(
            codec.new_id(), f"{codec.TYPE_PREFIX}{fact.kind()}", "holdfast:test", subjects.subject(fact), now, 0, now, SAMPLE, "",
            fact,
        )
        for fact in facts
    ]  # fmt: skip


async def _test(args: argparse.Namespace) -> int:
    webhook, secret, settings = _webhook(args)
    accepted = True
    async with _sender() as send:
        for event in samples(args.template, SystemClock().now()):
            began = time.monotonic()
            answer = await send(webhook, secret, settings, event)
            took_ms = (time.monotonic() - began) * 1000
            good = _is_good(answer)
            status = answer.status if answer.status is not None else "none"
            print(f"{event.fact.kind()} {event.id}")
            print(f"  answer  {status}, after {took_ms:.0f} ms: {'accepted' if good else 'not accepted'}")
            if answer.says:
                print(fitted(f"  says    {answer.says}"))
            if answer.status is not None and 300 <= answer.status < 400:
                print("  redirects are not followed: use the URL that it redirects to")
            accepted &= good
    return 0 if accepted else 1


# --- dead letters -----------------------------------------------------------------------------------------------------


async def _dead(args: argparse.Namespace) -> int:
    letters = 0
    async with _letters(args.data) as dead:
        async for seq, letter in dead.all(args.webhook):
            letters += 1
            if args.output == "json":
                print(json.dumps({"seq": seq, **codec.to_builtins(letter)}, ensure_ascii=False))
            else:
                _print(seq, letter)
    if args.output == "text":
        print(count(letters, "dead letter") if letters else "no dead letters")
    return 0


def _print(seq: int, letter: DeadLetter) -> None:
    kind = str(letter.event.get("type", "")).removeprefix(codec.TYPE_PREFIX)
    happened = str(letter.event.get("recordedtime", ""))[:19].replace("T", " ")
    given_up = letter.given_up_at
    print(f"{seq}  {given_up:%Y-%m-%d %H:%M:%S} UTC  {letter.webhook}  {kind}")
    print(fitted(f"  {letter.reason}"))
    print(fitted(f"  event {letter.event.get('id')}, of {happened} UTC"))


async def _resend(args: argparse.Namespace) -> int:
    webhook, secret, settings = _webhook(args)
    accepted = kept = 0
    async with _letters(args.data) as dead, _sender() as send:
        async for seq, letter in dead.all(args.webhook):
            try:
                event = cloud_event.event_of(letter.event)
            except ValueError as error:
                answer = Answer(0, str(error))
            else:
                answer = await send(webhook, secret, settings, event)
            if _is_good(answer):
                await dead.forget(seq)
                accepted += 1
                continue
            kept += 1
            why = answer.says if not answer.status else f"{answer.status} {answer.says}"
            print(fitted(f"{seq} was not accepted: {why}"))
            if is_away(answer.status):
                print("the receiver is unavailable: the remaining events are not sent")
                break
    print(f"{accepted} accepted, {kept} not accepted")
    return 1 if kept else 0


# --- connections ------------------------------------------------------------------------------------------------------


def _is_good(answer: Answer) -> bool:
    return answer.status is not None and 200 <= answer.status < 300


@asynccontextmanager
async def _letters(data: Path) -> AsyncIterator[DeadLetters]:
    """Yield access to the dead letters on the fleet's broker. Raise HoldfastError if the broker cannot be reached."""
    opening = BrokerConnection.open(str(find(data)["nats_url"]), "operator", wait_s=REACH_S)
    try:
        async with closing(opening) as connection:
            if not connection.connected:
                raise HoldfastError(f"cannot reach the broker: {connection.why}")
            yield DeadLetters(connection)
    except BrokerRefused as error:
        raise HoldfastError(f"cannot read the dead letters: {error}") from error


Send = Callable[[Webhook, str, NotifierSettings, FollowedEvent], Awaitable[Answer]]


@asynccontextmanager
async def _sender() -> AsyncIterator[Send]:
    """Yield a function that sends an event to a webhook once, without retries, and returns the webhook's answer."""
    with without_ca_certificates():
        from controller.webhooks.sender import WebhookSender

    clock = SystemClock()
    async with closing(WebhookSender.open(clock, NotifierSettings().timeout_s)) as sender:

        async def send(
            webhook: Webhook, secret: str, settings: NotifierSettings, event: FollowedEvent
        ) -> Answer:
            made = templates.request(webhook.template, event, settings, secret, int(clock.now().timestamp()))
            if made is None:
                return Answer(204, "nothing for this template")
            return await sender.send(webhook.address, made)

        yield send


_COMMANDS = {"test": _test, "dead": _dead, "resend": _resend}


async def run(args: argparse.Namespace) -> int:
    """Run one subcommand of `holdfast webhooks`. Return 0, or 1 if a webhook did not accept an event.

    Raise HoldfastError if the subcommand fails."""
    return await _COMMANDS[args.webhooks](args)
