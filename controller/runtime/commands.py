"""Carries out operator commands: each once across all controllers, and before its deadline.

What happens to a command, from left to right:

    received by every controller ──▶ ended already? ──▶ answered again
                    │
                    ├── its deadline has passed ──▶ refused, and the refusal journalled
                    ├── another controller leads ─▶ waits until the command has ended or its deadline has passed
                    └── this controller leads ────▶ carried out ──▶ answered, once the journal has it

Only the leader answers. Every command that a controller has received ends in a fact with the command's id: the command's effect,
or `CommandRefused`. So a repeated command is not carried out again, even if another controller has become the leader.

The clocks of two machines are never compared. A deadline is an instant by the broker's clock, which also stamps the journal's
events. To check a deadline, a controller queries the broker for the time and for the journal's last sequence, and then reads up
to that sequence. A check alone does not guarantee timeliness, since a process can be paused between any two instructions. So the
facts carry the deadline, and readers ignore a fact that reaches the journal after its deadline (`Commanded.late`).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import structlog

from controller.ports import Answer, Clock, Command
from controller.runtime import command_answers
from events.decisions import PolicyAdopted
from events.errors import HoldfastError
from events.fact import Recorded
from events.journal.port import Journal, JournalUnavailable
from events.observations import Commanded, CommandRefused

AHEAD_MAX_S = 60.0  # a command with a deadline further away is rejected
SETTLE_S = 2.0  # grace after the deadline, for the leader to report an action just before it
# longest wait for an unavailable journal; then the command is dropped, long after its deadline
PATIENCE_S = 90.0
READ_S = 2.0  # time limit for reading up to the journal's end
LOOK_S = 0.02  # pause between two checks of a condition
SPELL_S = 2.0  # time without a leader after which another controller answers a query
FLUSH_S = 1.0
CERTAIN_S = 0.8  # time after the deadline to confirm that a command had no effect; its sender waits 1 s
KNOWN_MAX = 1000  # number of ended commands that are kept
LATE = "its deadline passed before it could be carried out, and it will not be carried out any more"

log = structlog.get_logger(__name__)

NOT_ACCEPTED = (
    "the journal did not accept {verb} before its deadline, so it has no effect and will have none: if the broker's permissions "
    "refuse the controller, its log has `broker_refuses` with the subject"
)


@dataclass(eq=False)
class OperatorCommands:
    """Receives operator commands in one controller, carries them out while that controller leads, and stores their answers."""

    journal: Journal
    clock: Clock
    _: KW_ONLY
    seq: Callable[[], int]  # the journal position up to which `record_outcomes` was called
    leading: Callable[[], bool]
    vacant: Callable[[], bool]  # whether no controller seems to lead

    _ended: dict[str, Answer] = field(init=False, default_factory=dict)  # answers by command id, oldest first
    _acting: set[str] = field(init=False, default_factory=set)  # ids of commands being carried out

    def record_outcomes(self, batch: Sequence[Recorded]) -> None:
        """Record the outcomes of operator commands that the events in `batch` report.

        While this controller leads, it also refuses each command that reached the journal only after its deadline.
        """
        for recorded in batch:
            match recorded.fact:
                case CommandRefused(command=id, why=why):
                    self._end(id, {"error": why})
                case PolicyAdopted(command=id) as fact if id:
                    self._end(id, {"says": command_answers.allowed(fact)})
                case Commanded(command=id) as fact if id and not fact.late(recorded.at):
                    self._end(id, {"says": command_answers.done(fact)})
                case Commanded(command=id) as fact if id and self.leading() and id not in self._ended:
                    command = Command(id, fact.until, command_answers.VERBS[type(fact)], fact.worker, fact.by)
                    self._refuse(command, LATE, late=True)

    async def carry_out(self, command: Command, act: Callable[[], Awaitable[object]]) -> Answer | None:
        """Carry out an operator command with `act`, and return the answer.

        None if another controller answers, or if the outcome is unknown because the journal stayed unavailable.
        """
        give_up = self.clock.monotonic() + PATIENCE_S
        while self.clock.monotonic() < give_up:
            # checked before the journal's end is read, because a previous leader may have acted on the command meanwhile
            led = self._ours(command)
            due = await self._due(command)
            now, ours = self.clock.monotonic(), self._ours(command)
            if due is None:
                await self.clock.sleep(LOOK_S * 10)
            elif command.id in self._ended:
                return self._ended[command.id] if self.leading() else None
            elif now >= due + (0 if ours else SETTLE_S):
                return await self._refused(command, LATE, late=True)
            elif led and ours:
                return await self._act(command, due, act)
            else:
                await self._wait(command, due)
        log.warning("command_forgotten", command=command.id, verb=command.verb, worker=command.worker)
        return None

    async def ours_to_answer(self) -> bool:
        """Return whether this controller answers a read-only query.

        It does if it leads, or if no controller leads. First wait up to SPELL_S for this controller to become the leader.
        """
        give_up = self.clock.monotonic() + SPELL_S
        while not self.leading() and self.clock.monotonic() < give_up:
            await self.clock.sleep(LOOK_S)
        return self.leading() or self.vacant()

    async def _due(self, command: Command) -> float | None:
        """Return when the command's deadline passes, by this process's monotonic clock; the result may be slightly early.

        None if the journal did not answer, or was not read to its end within READ_S. If a time is returned, this controller has
        read everything that the journal held at the start of the call.
        """
        assert command.deadline is not None
        asked_at = self.clock.monotonic()
        try:
            end = await self.journal.end()
        except JournalUnavailable:
            return None
        while self.seq() < end.seq:
            if self.clock.monotonic() > asked_at + READ_S:
                return None
            await self.clock.sleep(LOOK_S)
        return asked_at + (command.deadline - end.at).total_seconds()

    def _ours(self, command: Command) -> bool:
        return self.leading() and command.id not in self._acting

    async def _wait(self, command: Command, due: float) -> None:
        """Wait until this controller may carry out the command, or the command has ended, but at most until `due` + SETTLE_S."""
        while not self._ours(command) and command.id not in self._ended:
            if self.clock.monotonic() >= due + SETTLE_S:
                return
            await self.clock.sleep(LOOK_S)

    async def _act(self, command: Command, due: float, act: Callable[[], Awaitable[object]]) -> Answer | None:
        """Carry out the command as the leader, and return the answer once the journal has the command's fact.

        None if it is not certain, after the deadline `due`, whether the journal has accepted the fact.
        """
        if due - self.clock.monotonic() > AHEAD_MAX_S:
            return await self._refused(
                command, f"its deadline is more than {AHEAD_MAX_S:g} s away by the broker's clock"
            )
        self._acting.add(command.id)
        try:
            said = await act()
        except HoldfastError as error:
            return await self._refused(command, str(error))
        except Exception as error:
            log.error("command_failed", verb=command.verb, worker=command.worker, exc_info=error)
            return await self._refused(command, "internal error, see the controller's log")
        finally:
            self._acting.discard(command.id)
        if isinstance(said, str) and self.journal.withheld(command.id):
            # carried out, although the kinds in force do not yet allow its fact on the journal
            self._end(command.id, {"says": said})
        while command.id not in self._ended and self.clock.monotonic() < due:
            await self.clock.sleep(LOOK_S)
        if isinstance(said, str) and "says" in self._ended.get(command.id, {}):
            self._ended[command.id] = {"says": said}  # more detailed than the answer derived from the fact
        return self._ended.get(command.id) or await self._not_accepted(command)

    async def _not_accepted(self, command: Command) -> Answer | None:
        """Return an error if the journal has not accepted the command's fact in time; None if the outcome stays unknown.

        The outcome is known once this controller has read everything that the journal held at the deadline, by the broker's
        clock. If the fact turns out to be on the journal, return the answer that follows from the fact.
        """
        give_up = self.clock.monotonic() + CERTAIN_S
        while command.id not in self._ended and (asked_at := self.clock.monotonic()) < give_up:
            due = await self._due(command)
            if due is not None and due <= asked_at and command.id not in self._ended:
                return {"error": NOT_ACCEPTED.format(verb=command.verb)}
            await self.clock.sleep(LOOK_S * 5)
        return self._ended.get(command.id)

    async def _refused(self, command: Command, why: str, *, late: bool = False) -> Answer:
        self._refuse(command, why, late=late)
        await self.journal.flush(FLUSH_S)
        return self._ended[command.id]

    def _refuse(self, command: Command, why: str, *, late: bool = False) -> None:
        refused = CommandRefused(
            worker=command.worker, verb=command.verb, command=command.id, why=why, late=late, by=command.by
        )
        self.journal.observe(refused)
        self._end(command.id, {"error": why})
        log.info("command_refused", verb=command.verb, worker=command.worker, why=why)

    def _end(self, id: str, answer: Answer) -> None:
        self._ended[id] = answer
        while len(self._ended) > KNOWN_MAX:
            del self._ended[next(iter(self._ended))]
