"""Verifies the store's rows and the controller's decisions against the journal.

The fleet state is folded from the journal again. For each recorded decision, the deciders (the functions that decide about
workers) run again with the state, policy and deciders version then in force. They must return the same decision. Decisions of
deciders older than `OLDEST` are applied to the state, but not decided again.

At the store's position, the store's rows must equal the rows computed from the folded state. Every event in the store's audit
table must equal the same event on the journal.
"""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.deciders.fleet import (
    DECIDERS_VERSION,
    OLDEST,
    Fleet,
    FleetPolicy,
    Shares,
    evolve,
    load,
    settle,
)
from controller.ports import ReadPosition, RowsRead, Snapshot
from controller.read_model import rows as projection
from controller.read_model.diff import differences, first_difference, plain
from controller.replay.event_lookup import name
from controller.replay.store import HistoryStore, StoreSnapshot
from controller.runtime.bounded_read import history
from controller.runtime.initial_fold import oldest, order_from
from controller.terminal_text import shortened
from events import codec
from events.decisions import Absorbed, PolicyAdopted
from events.errors import HoldfastError
from events.fact import Decision, Fact, Recorded, Skipped
from events.intrusion.source_rule import forged
from events.journal.port import Journal, JournalDropped
from events.order import Order
from events.versions import InForce

_END = "the end of the stream"
_REPAIR = "run `holdfast replay rebuild` to project the store's rows again from the journal"
_NO_END = (
    "the journal is shorter than what the store has folded: restore the broker's directory from a backup, or continue with "
    "what the journal holds (`holdfast up --accept-journal`)"
)
TRIES = 5  # attempts to start at the oldest snapshot of a journal that is dropping events
SHOWN_CHARS_MAX = 600  # maximum characters of each side of a difference


@dataclass(frozen=True, slots=True)
class VerifyDifference:
    """The first difference that was found: where it is, the expected value, and the actual value."""

    where: str  # a row of a table, an event of the audit table, or a decision
    seq: int
    expected: Any
    found: Any

    def text(self) -> str:
        """Format the difference as text, with long values shortened."""
        return f"{self.where} differs at {self.seq}:\n  expected {_brief(self.expected)}\n  found    {_brief(self.found)}"

    def remedy(self) -> str:
        """Return how to repair the difference; "" for a wrong decision.

        A wrong decision cannot be repaired, because it stays on the journal."""
        if self.where.startswith("decision"):
            return ""
        return _NO_END if self.where == _END else _REPAIR


def _brief(value: Any) -> str:
    """Return a value as text of at most SHOWN_CHARS_MAX characters. `-o json` prints the full value."""
    return shortened(str(value), SHOWN_CHARS_MAX)


@dataclass
class VerifyReport:
    """How much was verified, and the first difference if one was found."""

    begins: int = 1  # sequence number of the journal's oldest event
    since: int = 0  # sequence number of the snapshot from which the fold began; 0: the fold began at the journal's start
    folded: int = 0  # number of events folded
    decided: int = 0  # number of decisions for which the deciders returned the same decision again
    # number of messages that no reader folds, because they are not Holdfast events or are quarantined
    foreign: int = 0
    forged: int = 0  # number of facts that their source cannot have published
    # number of decisions not decided again: unsupported deciders version, or no policy adopted yet
    skipped: int = 0
    skipped_versions: set[int] = field(default_factory=set)
    rows: int = 0  # number of rows that are equal
    audited: int = 0  # number of stored events that are equal
    position: int = 0  # sequence number up to which the store shows events
    lag: int = 0  # number of events on the journal that the store does not show yet
    difference: VerifyDifference | None = None

    def as_json(self) -> dict[str, object]:
        """Return the report as plain JSON types."""
        return {**codec.to_builtins(self), "skipped_versions": sorted(self.skipped_versions)}

    def lines(self) -> list[str]:
        """Format the report as lines of text."""
        difference = self.difference
        identical = "all but the last" if difference and difference.where.startswith("decision") else "all"
        of = ", ".join(map(str, sorted(self.skipped_versions))) or "none adopted"
        ours = f"{OLDEST} to {DECIDERS_VERSION}" if OLDEST < DECIDERS_VERSION else str(OLDEST)
        lines = [
            (self.begins > 1, f"the journal begins at {self.begins}: earlier events were dropped at its limits"),
            (True, f"folded {self.folded} events from {self.since + 1}"),
            (True, f"decided {self.decided} decisions again, {identical} identical"),
            (True, f"compared {self.rows} rows and {self.audited} stored events at {self.position}"),
            (self.skipped, f"did not decide {self.skipped} decisions again: deciders version {of}, this release decides by "
             f"{ours}"),
            (self.foreign, f"skipped {self.foreign} messages that are not events: see `holdfast journal inspect`"),
            (self.forged, f"{self.forged} facts claim a foreign source: forged, and counted for no source"),
            (self.lag, f"the projector is {self.lag} events behind"),
            (True, difference.text() if difference else "no difference"),
            (difference and difference.remedy(), difference.remedy() if difference else ""),
        ]  # fmt: skip
        return [line for applies, line in lines if applies]


class Differs(Exception):
    """Raised at the first difference, to end the fold."""

    def __init__(self, difference: VerifyDifference) -> None:
        super().__init__(difference.where)
        self.difference = difference


async def verify(journal: Journal, store: HistoryStore, *, since: int = 0) -> VerifyReport:
    """Verify the store and the decisions against the journal, and stop at the first difference.

    Verification starts at the store's last snapshot before the sequence number `since`. If `since` is 0, verification starts
    at the journal's start. If the journal has dropped events after that point, verification starts at the journal's oldest
    snapshot. Raise JournalChanged if the journal has dropped events and has no snapshot.
    """
    async with store.reading() as frozen:
        position = frozen.reading.position
        last = await journal.last_seq()
        snapshot = await store.snapshot_before(min(since, position.seq)) if since else None
        for left in reversed(range(TRIES)):
            first, starts = await journal.first_seq(), snapshot.position.through + 1 if snapshot else 1
            run = _Run(frozen, snapshot if first <= starts else await oldest(journal, starts - 1))
            run.report.begins = first
            run.report.position, run.report.lag = position.seq, max(0, last - position.seq)
            try:
                await run.all(journal, last)
            except Differs as found:
                run.report.difference = found.difference
            except JournalDropped:
                # A full journal drops its oldest events at any time, also those after the snapshot that was just found. Once
                # events were folded, another attempt would not help: the journal drops events faster than they are read.
                if not left or run.report.folded:
                    raise
                continue
            break
        return run.report


class _Run:
    def __init__(self, frozen: StoreSnapshot, snapshot: Snapshot | None) -> None:
        self._order: Order[Fleet] = order_from(snapshot)
        self._reading: RowsRead = frozen.reading
        self._position: ReadPosition = frozen.reading.position
        self._frozen = frozen
        self._shares = Shares()
        self._audit = _rows(frozen, self._order.last_seq)
        self._kept: Sequence[Any] | None = None  # the next row of the audit table
        tables = ("migrations", "exposures", "incidents")
        self._history: dict[str, dict[object, projection.Row]] = {table: {} for table in tables}
        self._batch: list[Recorded] = []  # the decisions of one settle run, collected until the run ends
        self._state: Fleet | None = None  # the fleet state on which these decisions were made
        self.report = VerifyReport(since=self._order.last_seq)

    async def all(self, journal: Journal, last: int) -> None:
        """Fold the journal up to sequence number `last`, and verify the decisions and the store on the way.

        Raise Differs at the first difference."""
        self._kept = await anext(self._audit, None)
        if self._position.seq <= self._order.last_seq:
            self._compare_rows()
        async for batch in history(journal, self._order.last_seq, last):
            for event in batch:
                await self._one(event)
        self._decide_again()
        if self._position.seq > self._order.last_seq:
            raise Differs(VerifyDifference(_END, last, f"at least {self._position.seq}", last))

    async def _one(self, event: Recorded) -> None:
        self._gather(event)
        pending = len(self._order.pending)
        self._order.take(event)
        self.report.folded += 1
        self.report.foreign += isinstance(event.fact, Skipped)
        self.report.forged += bool(forged(event.fact, event.source))
        if event.seq <= self._position.seq:
            repeated = not isinstance(event.fact, Decision) and len(self._order.pending) == pending
            await self._compare_event(event, repeated)
            if event.seq == self._position.seq:
                self._compare_rows()

    # --- decisions --------------------------------------------------------------------------------------------------

    def _gather(self, event: Recorded) -> None:
        """Collect the decisions of one settle run: one call of the deciders by a controller.

        The first event that is not part of the run shows that the run is complete. The deciders then decide the run again."""
        if not isinstance(event.fact, Decision):
            return self._decide_again()
        if event.seq <= self._order.position.decided:
            return  # the snapshot contains the effect of this decision
        if self._batch and _settle_of(event) != _settle_of(self._batch[0]):
            self._decide_again()
        if not self._batch:
            self._state = self._as_read(event.through)
        self._batch.append(event)

    def _as_read(self, through: int) -> Fleet:
        """Return the fleet state of a controller that had read the journal up to sequence number `through`."""
        pending = self._order.pending
        if not pending or pending[-1].seq <= through:
            return self._order.shown
        state = self._order.settled
        for event in pending:
            if event.seq <= through:
                state = evolve(state, event)
        return state

    def _decide_again(self) -> None:
        batch, state = self._batch, self._state
        self._batch, self._state = [], None
        if not batch or state is None:
            return
        first = batch[0].fact
        assert isinstance(first, Decision)
        force, policy = self._policy(state, first, len(batch))
        if policy is None:
            return
        found = [event.fact for event in batch if not isinstance(event.fact, Absorbed)]
        expected = settle(policy, state, first.decided_at, shares=self._shares, force=force)
        for n in range(max(len(expected), len(found))):
            ours, theirs = (side[n] if n < len(side) else None for side in (expected, found))
            if ours != theirs:
                event = batch[min(n, len(batch) - 1)]
                raise Differs(VerifyDifference(name(event), event.seq, _shown(ours), _shown(theirs)))
        self.report.decided += len(batch)

    def _policy(
        self, state: Fleet, first: Decision, decisions: int
    ) -> tuple[InForce | None, FleetPolicy | None]:
        """Return the `InForce` and the policy under which a settle run (one call of the deciders) was decided.

        If this release cannot decide the run again, return None for both, and count the run's decisions as skipped. `first` is
        the run's first decision, and `decisions` is the number of the run's decisions."""
        adopted, force = state.policy, InForce.of(state.kinds, state.deciders_version)
        # a new leader adopts its policy first, for the rest of the settle run
        if isinstance(first, PolicyAdopted):
            adopted = first.policy
            force = InForce(first.kinds, first.deciders_version, first.allowed_by, first.command)
        version = force.deciders_version
        if adopted is None or not OLDEST <= version <= DECIDERS_VERSION:
            self.report.skipped += decisions
            if adopted is not None:
                self.report.skipped_versions.add(version)
            return None, None
        return force, load(adopted)

    # --- the store --------------------------------------------------------------------------------------------------

    async def _compare_event(self, event: Recorded, repeated: bool) -> None:
        row = self._kept
        for part, found in projection.history([event]).items():
            self._remember(part, found)
        if not projection.audited(event.fact):
            if row is None or row[0] > event.seq:
                return
            raise Differs(VerifyDifference("fleet_events", event.seq, event.fact.kind(), list(row)))
        if row is None or row[0] > event.seq:
            if repeated or (await self._frozen.locate(event.id) or event.seq) < event.seq:
                return  # a repeated event is stored only once, under its first sequence number
            raise Differs(VerifyDifference("fleet_events", event.seq, _shown(event.fact), None))
        expected, names = projection.event_row(event), projection.EVENT_COLUMNS
        for n, (ours, theirs) in enumerate(zip(expected[:-1], row[:-1], strict=True)):
            if ours != theirs:
                where = f"fleet_events: {names[n]}"
                raise Differs(VerifyDifference(where, event.seq, plain(ours), plain(theirs)))
        if not _same(event.fact, expected[-1], row[-1]):
            path, ours, theirs = first_difference(json.loads(expected[-1]), json.loads(row[-1]))
            raise Differs(VerifyDifference(f"fleet_events: {names[-1]}{path}", event.seq, ours, theirs))
        self.report.audited += 1
        self._kept = await anext(self._audit, None)

    def _remember(self, part: str, rows: Sequence[projection.Row]) -> None:
        verb, _, table = part.partition(" ")
        for row in rows:
            if verb == "append":
                self._history[table].setdefault(row[0], row)
            elif known := self._history[table].get(row[0]):
                self._history[table][row[0]] = (*known[:5], *row[1:])

    def _compare_rows(self) -> None:
        expected = projection.state(self._order.shown)
        for table in projection.COLUMNS:
            if table in expected:
                self._compare(table, expected[table], complete=True)
            else:
                self._compare(table, list(self._history[table].values()), complete=self.report.since == 0)
        for what, ours, theirs in (
            ("settled position", self._order.position, self._position.settled),
            ("shown position", self._order.last_seq, self._position.seq),
        ):
            if ours != theirs and self._position.seq >= self._order.last_seq > 0:
                raise Differs(VerifyDifference(f"projection: {what}", self._position.seq, ours, theirs))

    def _compare(self, table: str, expected: Sequence[projection.Row], *, complete: bool) -> None:
        for found in differences(table, expected, self._reading.rows[table], complete=complete):
            raise Differs(VerifyDifference(found.where, self._position.seq, found.expected, found.found))
        self.report.rows += len(expected)


async def _rows(frozen: StoreSnapshot, after: int) -> AsyncIterator[Sequence[Any]]:
    async for batch in frozen.events(after):
        for row in batch:
            yield row


def _same(fact: Fact, ours: str, theirs: str) -> bool:
    """Return whether the stored JSON body `theirs` means the same as `ours`, the JSON body of `fact`.

    A body from an older release may lack optional fields that were added later, and still mean the same."""
    expected, found = json.loads(ours), json.loads(theirs)
    if expected == found:
        return True
    if not isinstance(found, dict) or found.keys() - expected.keys():
        return False
    try:
        again = codec.encode_body(codec.decode_body(fact.kind(), theirs.encode()))
        return bool(json.loads(again) == json.loads(codec.encode_body(fact)))
    except HoldfastError:
        return False


def _settle_of(event: Recorded) -> tuple[object, ...]:
    """Return a key that identifies the settle run (the call of the deciders) in which a decision was made."""
    assert isinstance(event.fact, Decision)
    return (event.source, event.through, event.fact.decided_at)


def _shown(fact: object) -> Any:
    if fact is None:
        return None
    kind = {"kind": fact.kind()} if isinstance(fact, Decision) else {}
    return {**kind, **codec.to_builtins(fact)}
