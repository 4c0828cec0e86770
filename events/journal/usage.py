"""The journal's size and growth rate, as the broker reports them.

Nothing is remembered between two calls.

The growth is that of the last day, or since the stream was created if that is less than a day ago. It is estimated as the number
of messages in that time, multiplied by the average size of all messages.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from events import codec, subjects
from events.journal.broker import ask
from events.nats.connection import BrokerConnection

WINDOW = timedelta(days=1)
SHORTEST = timedelta(minutes=10)  # minimum age of a stream for an estimate of its growth
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FORGOTTEN_AFTER_S = 5.0  # after which the broker deletes the consumer that counts


@dataclass(frozen=True, slots=True)
class JournalUsage:
    """The stream's use of the broker's disk."""

    first_seq: int  # of the oldest event on the stream
    last_seq: int
    bytes: int
    bytes_max: int | None  # None: no limit but the disk
    bytes_a_day: float | None  # None: the stream is too young for an estimate
    age_max: timedelta | None = None  # None: no limit
    at: datetime = EPOCH  # when this was measured, by the clock that stamps the events
    refuses: bool = False  # at `bytes_max` it refuses new events, instead of dropping its oldest ones


async def usage(
    connection: BrokerConnection,
    window: timedelta = WINDOW,
    shortest: timedelta = SHORTEST,
    *,
    growth: bool = True,
) -> JournalUsage:
    """Query the broker. The growth is that within `window`; it is omitted for a stream younger than `shortest`, and without
    `growth`.

    Raise JournalUnavailable or BrokerRefused.
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
    """Return the number of messages since an instant: the pending count of a consumer that starts then."""
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
