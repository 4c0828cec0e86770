"""Delivers events to one webhook: every event of the configured kinds, in order, at least once.

    journal ─▶ request ─▶ try ─┬─▶ delivered ───────────────▶ the next one
                  ▲            ├─▶ wait ─┐
                  └────────────┼─────────┘
                               ├─▶ given up ─▶ dead letter ─▶ the next one
                               └─▶ 410 ─▶ stopped

The arrows show what happens to an event. The broker stores the journal position up to which events have been delivered
to the webhook. An event counts as delivered once the notifier requests the next event from the broker. An event that was
delivered just before a crash is therefore delivered again, with the same id.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

import structlog

from controller.metric_table import MetricTable, counter, gauge
from controller.ports import Clock
from controller.webhooks import cloud_event, templates
from controller.webhooks.retry_policy import Answer, ReceiverGone, RetryLater, Undeliverable, step
from controller.webhooks.settings import NotifierSettings, Webhook
from events.dead_letters import DeadLetter, LetterNotStored
from events.follow import CannotFollow, FollowedEvent

OUTCOMES = ("delivered", "failed", "dead_letter", "left_out")


class NotifierMetrics(MetricTable):
    """The notifier's metrics, in the process's own registry."""

    deliveries = counter(
        "holdfast_webhook_deliveries",
        "Delivery attempts by outcome: delivered, failed (retried later), dead_letter (given up), left_out (the template has "
        "nothing for it)",
        "webhook",
        "outcome",
    )
    pending = gauge("holdfast_webhook_pending", "Events waiting for this webhook", "webhook")
    lag = gauge(
        "holdfast_webhook_lag_seconds", "Age of the event being delivered; 0: none is waiting", "webhook"
    )
    in_a_row = gauge("holdfast_webhook_failures_in_a_row", "Consecutive failed tries", "webhook")
    last_success = gauge(
        "holdfast_webhook_last_success_timestamp_seconds",
        "Unix time of the last accepted event; 0: none yet",
        "webhook",
    )
    stopped = gauge("holdfast_webhook_stopped", "1: it answered 410 Gone and gets no more events", "webhook")

    def begin(self, webhook: str) -> None:
        """Create all metrics of a webhook with the value 0, so that they exist before the first event."""
        for outcome in OUTCOMES:
            self.deliveries.labels(webhook, outcome)
        for one in (self.pending, self.lag, self.in_a_row, self.last_success, self.stopped):
            one.labels(webhook).set(0)


FOLLOW_AGAIN_S = 2.0
SETTLED_S = 30.0  # following the journal this long without an error counts as healthy
BURY_AGAIN_S = 2.0
LAST_S = 5.0  # seconds for the current try to finish when the process stops
TAKEN_S = 1.0  # seconds to acknowledge the last event to the broker when the process stops

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Delivery:
    """Delivers events to one webhook, until the webhook's receiver responds with status 410 (gone) or the task is cancelled."""

    webhook: Webhook
    settings: NotifierSettings
    follow: Callable[[datetime], AsyncGenerator[FollowedEvent, None]]  # follows the journal for this webhook
    send: Callable[[str, templates.WebhookRequest], Awaitable[Answer]]  # posts a request to a URL
    bury: Callable[[DeadLetter], Awaitable[None]]  # stores an undeliverable event
    clock: Clock
    metrics: NotifierMetrics
    chance: Callable[[], float] = random.random
    stopped: str = ""  # why nothing more is sent; empty while events are sent
    _reason: str = ""  # the last error of following the journal
    _began_s: float = 0.0  # monotonic time when following the journal last began
    _at: datetime | None = None  # time of the event being delivered
    _last: str = ""  # id of the last delivered event
    _answered: bool = False  # whether the try in progress at the end was accepted

    def __post_init__(self) -> None:
        self._since = self.clock.now()  # where to start if the broker has no position for this webhook
        self.metrics.begin(self.webhook.called)

    async def run(self) -> None:
        """Follow the journal and deliver events, until cancelled. After the receiver is gone, only wait.

        Raise UsageError if the settings for following the journal are invalid.
        """
        while not self.stopped:
            following, self._began_s = self.follow(self._since), self.clock.monotonic()
            try:
                await self._deliver_all(following)
            except CannotFollow as error:
                if str(error) != self._reason:
                    log.warning("webhook_waits", webhook=self.webhook.called, reason=str(error))
                self._reason = str(error)
                await self.clock.sleep(FOLLOW_AGAIN_S)
            except asyncio.CancelledError:
                if self._answered:
                    with contextlib.suppress(Exception):
                        await asyncio.wait_for(anext(following), TAKEN_S)
                raise
            finally:
                with contextlib.suppress(Exception):
                    await following.aclose()
        await asyncio.Event().wait()

    async def _deliver_all(self, following: AsyncGenerator[FollowedEvent, None]) -> None:
        name = self.webhook.called
        async for event in following:
            self._reason, self._at = "", event.at
            self.metrics.pending.labels(name).set(event.pending + 1)
            # equal if the broker missed the acknowledgement and delivers the event again
            if event.id != self._last:
                await self._deliver(event)
            if self.stopped:
                return
            self._last, self._since, self._at = event.id, event.at, None
            self.metrics.pending.labels(name).set(event.pending)

    @property
    def why_not(self) -> str:
        """The reason why no event can be delivered. Empty while events are delivered, retried, or awaited from the journal."""
        follows = self.clock.monotonic() - self._began_s > SETTLED_S
        return self.stopped or ("" if follows else self._reason)

    def measure(self) -> None:
        """Set the lag metric to the age of the event that is being delivered, or to 0 if there is none."""
        age_s = 0.0 if self._at is None else max(0.0, (self.clock.now() - self._at).total_seconds())
        self.metrics.lag.labels(self.webhook.called).set(age_s)

    # --- one event --------------------------------------------------------------------------------------------------

    async def _deliver(self, event: FollowedEvent) -> None:
        tries = 0
        while True:
            answer = await self._try(event)
            if answer is None:
                return self._count("left_out")
            tries += 1
            age_s = (self.clock.now() - event.at).total_seconds()
            match step(self.settings, answer, tries, age_s, self.chance()):
                case RetryLater(wait_s=wait_s):
                    self._failed(event, answer, tries, wait_s)
                    await self.clock.sleep(wait_s)
                case Undeliverable(reason=reason):
                    self._failed(event, answer, tries)
                    return await self._bury(event, answer, tries, reason)
                case ReceiverGone(reason=reason):
                    return self._stop(event, reason)
                case _:
                    return self._succeeded()

    async def _try(self, event: FollowedEvent) -> Answer | None:
        """Send an event to the webhook once, and return the response; None if the template has no message for this event."""
        now = int(self.clock.now().timestamp())
        try:
            secret = ""
            if self.webhook.secret_file:
                # read for each try, because secrets are rotated
                secret = await asyncio.to_thread(self.webhook.secret)
            request = templates.request(self.webhook.template, event, self.settings, secret, now)
        except ValueError as error:
            return Answer(None, f"its secret cannot be read: {error}")
        if request is None:
            return None
        trying = asyncio.ensure_future(self.send(self.webhook.address, request))
        try:
            return await asyncio.shield(trying)
        except asyncio.CancelledError:
            done, _ = await asyncio.wait({trying}, timeout=LAST_S)
            trying.cancel()
            if done:
                status = trying.result().status
                self._answered = status is not None and 200 <= status < 300
            raise

    async def _bury(self, event: FollowedEvent, answer: Answer, tries: int, reason: str) -> None:
        letter = DeadLetter(
            webhook=self.webhook.called, reason=reason, tries=tries, status=answer.status,
            event=cloud_event.attributes(event), given_up_at=self.clock.now(),
        )  # fmt: skip
        while True:
            try:
                await self.bury(letter)
                break
            except LetterNotStored as error:
                log.warning("dead_letter_waits", webhook=letter.webhook, reason=str(error))
                await self.clock.sleep(BURY_AGAIN_S)
        self._count("dead_letter")
        log.error(
            "webhook_gave_up",
            webhook=letter.webhook,
            event_id=event.id,
            kind=event.fact.kind(),
            reason=reason,
        )

    # --- metrics and logs -----------------------------------------------------------------------------------------

    def _count(self, outcome: str) -> None:
        self.metrics.deliveries.labels(self.webhook.called, outcome).inc()

    def _failed(self, event: FollowedEvent, answer: Answer, tries: int, wait_s: float | None = None) -> None:
        self._count("failed")
        self.metrics.in_a_row.labels(self.webhook.called).inc()
        log.warning(
            "webhook_failed", webhook=self.webhook.called, event_id=event.id, kind=event.fact.kind(), tries=tries,
            status=answer.status, says=answer.says, wait_s=wait_s,
        )  # fmt: skip

    def _succeeded(self) -> None:
        self._count("delivered")
        self.metrics.in_a_row.labels(self.webhook.called).set(0)
        self.metrics.last_success.labels(self.webhook.called).set(self.clock.now().timestamp())

    def _stop(self, event: FollowedEvent, reason: str) -> None:
        self.stopped, self._at = reason, None
        self.metrics.stopped.labels(self.webhook.called).set(1)
        log.error("webhook_stopped", webhook=self.webhook.called, event_id=event.id, reason=reason)
