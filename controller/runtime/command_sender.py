"""Sends an operator command, and looks up its outcome on the journal if no controller answers.

A command has an id, and is carried out before its deadline or never. The sender first reads the broker's clock and sets the
deadline by that clock, so no two hosts' clocks need to agree. If the answer does not arrive, the journal shows the outcome. If
the journal has no fact of the command when the deadline passes by the broker's clock, the command is never carried out.
"""

import asyncio
from datetime import datetime, timedelta

from controller.runtime import command_answers
from controller.runtime.bounded_read import history
from events import codec, subjects
from events.decisions import PolicyAdopted
from events.journal import stream
from events.journal.port import JournalUnavailable, StreamEnd
from events.nats.bus import BusUnavailable, NatsBus, NoAnswer, NoSubscriber, NotAllowed
from events.observations import Commanded, CommandRefused

ON_ITS_WAY_S = 1.0  # extra wait for an answer that was sent just before the deadline
LOOK_S = 0.1  # extra wait after the deadline, before the journal is read

Said = dict[str, object]


class NotCarriedOut(NoAnswer):
    """No controller has carried out the command, and none will any more."""


async def command(bus: NatsBus, url: str, verb: str, body: Said, within_s: float) -> Said:
    """Send a command that may be carried out within `within_s` seconds, and return the answer.

    `verb` is the last part of the control subject. `url` is the broker's URL, for a second connection that reads the journal.

    Raises:
        NotCarriedOut: the command was certainly not carried out.
        NoSubscriber: no controller receives commands.
        NotAllowed: the broker's permissions forbid the command.
        NoAnswer, JournalUnavailable: the outcome is unknown.
    """
    begun = await _end(bus)
    id, deadline = codec.new_id(), begun.at + timedelta(seconds=within_s)
    whole = {**body, "id": id, "deadline": deadline.isoformat()}
    try:
        return dict(await bus.request(f"{subjects.CONTROL}.{verb}", whole, within_s + ON_ITS_WAY_S))
    except (NoSubscriber, NotAllowed):
        raise
    except (NoAnswer, BusUnavailable) as error:
        try:
            found = await _found(bus, url, id, begun.seq, deadline)
        except (JournalUnavailable, TimeoutError) as unseen:
            raise NoAnswer(
                f"{error}; whether {verb} was carried out is unknown ({unseen}): check `holdfast events`. "
                f"It will not be carried out later than {within_s:g} s after it was sent"
            ) from error
        if found is None:
            raise NotCarriedOut(
                f"no controller reported that it carried out {verb} within {within_s:g} s, and none will carry it out any more"
            ) from error
        return found


async def _end(bus: NatsBus) -> StreamEnd:
    """Return the journal's last sequence and the broker's current time. Raise JournalUnavailable if there is no answer."""
    state = await stream.state(bus.connection)
    return StreamEnd(state.last_seq, state.at)


async def _found(bus: NatsBus, url: str, id: str, after: int, deadline: datetime) -> Said | None:
    """Wait for a command's deadline, then return the command's outcome; None if it was not carried out.

    The outcome is searched in the journal's events after sequence `after`, over a new connection to the broker at `url`. Raise
    JournalUnavailable if the journal does not answer.
    """
    from events.journal.nats import NatsJournal  # imported late: it is slow to import

    end = await _end(bus)
    if (left_s := (deadline - end.at).total_seconds()) >= 0:
        await asyncio.sleep(left_s + LOOK_S)
        end = await _end(bus)
    found: Said | None = None
    journal = await NatsJournal.connect(url, "reader", None, make=False)
    try:
        async for batch in history(journal, after, end.seq):
            for recorded in batch:
                match recorded.fact:
                    case PolicyAdopted(command=known) as fact if known == id:
                        found = {"says": command_answers.allowed(fact)}
                    case CommandRefused(command=known, why=why) if known == id:
                        found = {"error": why}
                    case Commanded(command=known) as fact if known == id and not fact.late(recorded.at):
                        found = {"says": command_answers.done(fact)}
    finally:
        await journal.close()
    return found
