"""Operator commands: carried out once, by the leader, before their deadline or never."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest
from memory_journal import MemoryJournal, MemoryStream
from virtual_clock import VirtualClock

from controller.ports import Answer, Command
from controller.runtime.command_answers import NotPossible
from controller.runtime.commands import AHEAD_MAX_S, KNOWN_MAX, SETTLE_S, OperatorCommands
from events.fact import Fact
from events.journal.port import StreamEnd
from events.observations import CommandRefused, DrainRequested

WITHIN_S = 5.0


class SlowJournal(MemoryJournal):
    """A journal with answers that take `slow_s`, by the caller's clock."""

    clock: VirtualClock
    slow_s = 0.0
    asked: Callable[[], None] = staticmethod(lambda: None)

    async def end(self) -> StreamEnd:
        end = await super().end()
        self.asked()
        if self.slow_s:
            await self.clock.sleep(self.slow_s)
        return end


class Controller:
    """One of several controllers on one journal. While `stopped`, it only queues what it receives."""

    def __init__(self, world: "Controllers", name: str) -> None:
        self.world, self.name = world, name
        self.journal = SlowJournal(world.stream, f"controller:{name}")
        self.journal.clock = world.clock
        self.stopped, self.read = False, 0
        self.acted: list[str] = []
        self.fails: Exception | None = None
        self.says_nothing = False
        self._backlog: list[Callable[[], None]] = []
        self.commands = OperatorCommands(
            self.journal, world.clock, seq=lambda: self.read, leading=lambda: world.leader == name,
            vacant=lambda: not world.leader,
        )  # fmt: skip

    def catch_up(self) -> int:
        """Read new events of the journal."""
        fresh = self.world.stream.events[self.read :]
        self.read += len(fresh)
        self.commands.record_outcomes(fresh)
        return self.read

    async def _act(self, command: Command) -> None:
        if self.fails is not None:
            raise self.fails
        self.acted.append(command.id)
        if not self.says_nothing:
            self.journal.observe(
                DrainRequested(
                    worker=command.worker, instance="i", command=command.id, until=command.deadline, by=command.by
                )
            )  # fmt: skip
            self.catch_up()

    def hear(self, command: Command) -> "asyncio.Future[Answer | None]":
        """Receive a command."""
        answered: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()

        async def carry_out() -> None:
            answered.set_result(await self.commands.carry_out(command, lambda: self._act(command)))

        def begin() -> None:
            self.world.tasks.append(asyncio.ensure_future(carry_out()))

        self._backlog.append(begin)
        self.go_on(self.stopped)
        return answered

    def go_on(self, stopped: bool = False) -> None:
        """Resume, and read what has come meanwhile."""
        self.stopped = stopped
        while self._backlog and not stopped:
            self._backlog.pop(0)()


class Controllers:
    """Two controllers, of which the first leads."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.stream = MemoryStream(clock=self.clock.now)
        self.leader, self.tasks = "one", list[asyncio.Future[None]]()
        self.one, self.two = Controller(self, "one"), Controller(self, "two")

    def command(self, number: int = 1, within_s: float = WITHIN_S) -> Command:
        """Return a command that is sent now."""
        deadline = self.clock.now() + timedelta(seconds=within_s)
        return Command(f"command-{number}", deadline, "drain", f"w{number}", "ada")

    def send(self, command: Command) -> "list[asyncio.Future[Answer | None]]":
        """Send a command to both."""
        return [controller.hear(command) for controller in (self.one, self.two)]

    def facts(self, kind: type[Fact]) -> list[Fact]:
        """Return the journal's facts of this kind."""
        return [event.fact for event in self.stream.events if isinstance(event.fact, kind)]

    async def wait(self, seconds: float) -> None:
        """Let time pass, in which running controllers read on."""
        for _ in range(max(1, round(seconds / 0.05))):
            await self.clock.advance(0.05)
            for controller in (self.one, self.two):
                if not controller.stopped:
                    controller.catch_up()


def refused(world: Controllers) -> list[tuple[str, bool]]:
    return [(f.command, f.late) for f in world.facts(CommandRefused) if isinstance(f, CommandRefused)]


@pytest.mark.parametrize("leader", ["one", "two"])
async def test_only_the_leader_carries_out_and_answers(leader: str) -> None:
    world = Controllers()
    world.leader = leader
    heard = dict(zip(("one", "two"), world.send(world.command()), strict=True))
    await world.wait(10)
    answers = {name: future.result() for name, future in heard.items()}
    assert answers == {"one": None, "two": None} | {leader: {"says": "w1 will drain"}}
    acted = {c.name: c.acted for c in (world.one, world.two)}
    assert acted == {"one": [], "two": []} | {leader: ["command-1"]}
    assert refused(world) == []


async def test_a_command_that_the_journal_does_not_accept_is_answered_as_such() -> None:
    """A controller that may not publish the fact reports that after the deadline, instead of staying silent."""
    world = Controllers()
    world.one.says_nothing = True
    one, _ = world.send(world.command(within_s=1.0))
    await world.wait(0.9)
    assert not one.done()
    await world.wait(0.6)
    assert "the journal did not accept drain before its deadline" in (one.result() or {})["error"]


async def test_no_answer_is_given_while_the_outcome_is_uncertain() -> None:
    """If the journal cannot be read after the deadline, its controller makes no claim."""
    world = Controllers()
    world.one.says_nothing = True
    one, _ = world.send(world.command(within_s=1.0))
    await world.wait(0.5)
    world.stream.reachable = False
    await world.wait(2)
    assert one.result() is None


async def test_a_new_leader_carries_out_in_time_what_a_stopped_one_did_not() -> None:
    world = Controllers()
    world.one.stopped = True
    one, two = world.send(world.command())
    await world.wait(2)
    world.leader = "two"
    await world.wait(1)
    assert two.result() == {"says": "w1 will drain"}
    world.one.go_on()
    await world.wait(10)
    assert one.result() is None, "it is no longer the leader, and the journal has the outcome"
    assert (world.one.acted, world.two.acted, refused(world)) == ([], ["command-1"], [])


@pytest.mark.parametrize("taken_over", [False, True])
async def test_a_command_read_after_its_deadline_is_refused_and_journalled_as_refused(
    taken_over: bool,
) -> None:
    world = Controllers()
    world.one.stopped, world.two.stopped = True, not taken_over
    commands = [world.command(n, within_s=1) for n in range(4)]
    for command in commands:
        world.send(command)
    await world.wait(2)
    world.leader = "two" if taken_over else ""
    await world.wait(5)
    world.one.go_on()
    await world.wait(0.2)
    world.leader = world.leader or "one"
    await world.wait(5)
    assert (world.one.acted, world.two.acted) == ([], [])
    assert sorted(refused(world)) == [(command.id, True) for command in commands]


async def test_a_controller_paused_during_its_question_for_the_time_does_not_use_an_old_answer() -> None:
    world = Controllers()
    world.one.journal.slow_s = 2.0
    one = world.one.hear(world.command(within_s=1))
    await world.wait(10)
    assert "its deadline passed" in (one.result() or {})["error"]
    assert world.one.acted == []


async def test_a_new_leader_first_reads_the_last_facts_of_the_old_one() -> None:
    world = Controllers()
    command = world.command()

    def taken_over() -> (
        None
    ):  # the old leader's last fact comes right after the question, and the lease with it
        world.two.journal.asked = lambda: None
        world.one.journal.observe(
            DrainRequested(worker="w1", instance="i", command=command.id, until=command.deadline)
        )
        world.leader = "two"

    world.two.journal.asked = taken_over
    two = world.two.hear(command)
    await world.wait(1)
    assert two.result() == {"says": "w1 will drain"}
    assert world.two.acted == []


async def test_a_fact_that_lands_after_its_deadline_is_refused_too() -> None:
    world = Controllers()
    (one, _), command = world.send(world.command(1)), world.command(1)
    world.stream.reachable = False  # after the check: a fact that is recorded now lands later
    world.one.journal.observe(
        DrainRequested(worker="w1", instance="i", command=command.id, until=command.deadline)
    )
    await world.wait(WITHIN_S + SETTLE_S + 1)
    world.stream.reachable = True
    await world.wait(5)
    assert one.result() is None or "error" in (one.result() or {})
    assert world.one.acted == []
    assert refused(world) == [("command-1", True)]


async def test_a_repeated_command_id_gets_the_first_answer_and_has_no_effect() -> None:
    world = Controllers()
    command = world.command()
    world.send(command)
    again = world.one.hear(command)  # at the same time
    await world.wait(1)
    world.leader = "two"  # which has only read the fact
    await world.wait(10)
    later = world.send(command)
    await world.wait(1)
    assert again.result() == {"says": "w1 will drain"}
    assert [future.result() for future in later] == [None, {"says": "w1 will drain"}]
    assert (world.one.acted, world.two.acted, refused(world)) == (["command-1"], [], [])


async def test_a_repeated_id_of_a_refused_command_gets_the_first_answer() -> None:
    world = Controllers()
    command, world.one.fails = world.command(), NotPossible("w1 is dead")
    one, _ = world.send(command)
    await world.wait(1)
    assert one.result() == {"error": "w1 is dead"}
    world.leader = "two"
    _, two = world.send(command)
    await world.wait(1)
    assert two.result() == {"error": "w1 is dead"}
    assert world.two.acted == [] and refused(world) == [("command-1", False)]


async def test_an_internal_error_refuses_the_command_without_its_details() -> None:
    world = Controllers()
    world.one.fails = KeyError("a secret")
    one, _ = world.send(world.command())
    await world.wait(1)
    assert one.result() == {"error": "internal error, see the controller's log"}
    assert refused(world) == [("command-1", False)]


async def test_a_deadline_too_far_ahead_is_refused() -> None:
    world = Controllers()
    one, _ = world.send(world.command(within_s=AHEAD_MAX_S + 1))
    await world.wait(1)
    assert "more than 60 s away" in (one.result() or {})["error"]
    assert world.one.acted == []


async def test_a_command_waits_for_an_unavailable_journal() -> None:
    world = Controllers()
    world.stream.reachable = False
    one, two = world.send(world.command())
    await world.wait(3)
    world.stream.reachable = True
    await world.wait(1)
    assert (one.result(), two.result()) == ({"says": "w1 will drain"}, None)


async def test_a_query_is_answered_by_the_leader_or_by_any_controller_without_one() -> None:
    world = Controllers()

    async def asked() -> list[bool]:
        both: list[Awaitable[bool]] = [c.commands.ours_to_answer() for c in (world.one, world.two)]
        answers = asyncio.gather(*both)
        await world.wait(3)
        return await answers

    assert await asked() == [True, False]
    world.leader = ""
    assert await asked() == [True, True]


async def test_the_memory_of_commands_is_bounded() -> None:
    world = Controllers()
    first = world.command(0)
    for n in range(KNOWN_MAX + 2):
        command = world.command(n)
        world.one.journal.observe(
            DrainRequested(worker="w", instance="i", command=command.id, until=command.deadline)
        )
    world.one.catch_up()
    (one, _) = world.send(first)
    await world.wait(1)
    assert one.result() == {"says": "w0 will drain"}, (
        "its outcome was forgotten, and its deadline has not passed"
    )
    assert world.one.acted == [first.id]
