"""Computes the journal's size and growth rate from what the broker reports.

No state is kept between two calls. The growth covers the last day, or the age of the stream's oldest event if that is less than
a day. It is estimated as the number of messages in that time, multiplied by the average size of all messages.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from events import codec, subjects
from events.journal.broker import EPOCH, ask
from events.nats.connection import BrokerConnection

WINDOW = timedelta(days=1)
SHORTEST = timedelta(minutes=10)  # the growth of a younger stream is not estimated
FORGOTTEN_AFTER_S = 5.0  # the broker deletes the consumer that counts messages after this time


@dataclass(frozen=True, slots=True)
class JournalUsage:
    """The stream's size, limits and growth on the broker's disk."""

    first_seq: int  # sequence of the oldest event on the stream
    last_seq: int
    bytes: int
    bytes_max: int | None  # None: only the disk limits the size
    bytes_a_day: float | None  # None: the stream is too young for an estimate
    age_max: timedelta | None = None  # None: no limit
    at: datetime = EPOCH  # when the broker measured the usage, by the clock that stamps the events
    refuses: bool = False  # at `bytes_max` the stream refuses new events instead of dropping its oldest ones


async def usage(
    connection: BrokerConnection,
    window: timedelta = WINDOW,
    shortest: timedelta = SHORTEST,
    *,
    growth: bool = True,
) -> JournalUsage:
    """Query the broker for the stream's size, limits and growth.

    The growth rate is measured within `window`. It is None if `growth` is not set, if the stream is empty, or if its oldest
    event is younger than `shortest`.

    Raise JournalUnavailable if the broker does not answer.
    """
    answer = await ask(connection, f"STREAM.INFO.{subjects.STREAM}")
    state, now = answer["state"], datetime.fromisoformat(answer["ts"])
    most, held = answer["config"].get("max_bytes", -1), state["bytes"]
    oldest = timedelta(microseconds=answer["config"].get("max_age", 0) // 1000)
    a_day = None
    if state["messages"] and growth:
        age = now - datetime.fromisoformat(state["first_ts"])
        if age >= shortest:
            came = await _since(connection, now - window) if age > window else state["messages"]
            a_day = came * (held / state["messages"]) * (timedelta(days=1) / min(age, window))
    return JournalUsage(
        state["first_seq"], state["last_seq"], held, most if most > 0 else None, a_day, oldest or None, now,
        refuses=answer["config"].get("discard") == "new",
    )  # fmt: skip


async def _since(connection: BrokerConnection, when: datetime) -> int:
    """Return the number of messages since the instant `when`.

    A new consumer that starts at that instant reports the number as its pending count.
    """
    name = f"count-{codec.new_id()[-12:]}"
    config = {
        "name": name,
        "deliver_policy": "by_start_time",
        "opt_start_time": when.isoformat(),
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": int(FORGOTTEN_AFTER_S * 1e9),
    }
    body = {"stream_name": subjects.STREAM, "config": config, "action": "create"}
    answer = await ask(connection, f"CONSUMER.CREATE.{subjects.STREAM}.{name}", body)
    return int(answer["num_pending"])
