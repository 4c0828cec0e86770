"""Spells: the times in which a worker answered canaries badly.

    good ✓         ✗ ✗ ✗        ✓ good
           └─ began ─┘   └─ ended ─┘       each somewhere in its gap, at `place`: 0 is the earliest possible, 1 the latest

A spell of wrong answers covers one canary: others may be answered correctly at that time. A spell of missing or slow answers
covers all canaries.
"""

from dataclasses import dataclass, replace

from controller.replay.whatif.journal_stretch import MUTE, SLOW, WRONG, RecordedCanaries
from events.observations import CanaryFailed, CanarySlow


@dataclass(frozen=True, slots=True)
class Spell:
    """One time in which a worker answered badly. Times are seconds since 1970."""

    after: float  # last good answer before it, or the first canary
    first: float  # when the first canary with a bad answer was sent
    last: float  # when the last canary with a bad answer was sent
    before: float  # the next good answer; infinity: none before the instance ended
    said: int  # SLOW, WRONG or MUTE
    asked: frozenset[int]  # the canaries that were answered badly; empty: all
    fact: CanaryFailed | CanarySlow  # the first bad answer
    took: float  # seconds from sending the canary until the journal recorded that answer

    def began(self, place: float) -> float:
        """Return when the spell began, assumed at `place` (0 to 1) in its gap."""
        if self.momentary and place < 1:
            return self.first
        return self.after + (self.first - self.after) * place

    def ended(self, place: float) -> float:
        """Return when the spell ended, assumed at `place` (0 to 1) in its gap. If unknown, it never ended, except at 0."""
        if self.momentary and place < 1:
            return self.first + self.took
        if self.before == float("inf"):
            return self.last + 1e-6 if place == 0 else self.before
        return max(self.last + 1e-6, self.last + (self.before - self.last) * place)

    @property
    def momentary(self) -> bool:
        """Whether the spell is a single slow answer among quick ones: then most likely no other answer was slow."""
        return self.said == SLOW and self.first == self.last

    def tells(self, canary: int) -> bool:
        """Return whether a canary is answered badly during the spell."""
        return not self.asked or canary in self.asked


def spells(recorded: RecordedCanaries) -> list[Spell]:
    """Return the spells of one instance, sorted by their beginning."""
    general = [*_runs(recorded, range(len(recorded)), MUTE), *_runs(recorded, range(len(recorded)), SLOW)]
    wrong = [run for canary in range(len(recorded.names)) for run in _wrong(recorded, canary)]
    return sorted([*general, *_joined(wrong)], key=lambda one: one.first)


def _wrong(recorded: RecordedCanaries, canary: int) -> list[Spell]:
    places = [n for n in range(len(recorded)) if recorded.asked[n] == canary and recorded.said[n] != MUTE]
    return _runs(recorded, places, WRONG, frozenset({canary}))


def _runs(
    recorded: RecordedCanaries, places: range | list[int], result: int, canaries: frozenset[int] = frozenset()
) -> list[Spell]:
    """Return the spells of consecutive canaries with one kind of answer."""
    found: list[Spell] = []
    first: int | None = None
    well = recorded.sent[places[0]] if places else 0.0
    last = well
    for n in places:
        if recorded.said[n] == result:
            first = n if first is None else first
            last = recorded.sent[n]
            continue
        if first is not None:
            found.append(_spell(recorded, well, first, last, recorded.sent[n], canaries))
            first = None
        well = recorded.sent[n]
    if first is not None:
        found.append(_spell(recorded, well, first, last, float("inf"), canaries))
    return found


def _spell(
    recorded: RecordedCanaries, after: float, index: int, last: float, before: float, canaries: frozenset[int]
) -> Spell:
    first = recorded.sent[index]
    return Spell(
        after,
        first,
        last,
        before,
        recorded.said[index],
        canaries,
        recorded.facts[index],
        recorded.at[index] - first,
    )


def _joined(wrong: list[Spell]) -> list[Spell]:
    """Merge overlapping spells of several canaries into one: one cause makes all of them wrong."""
    found: list[Spell] = []
    for one in sorted(wrong, key=lambda one: one.first):
        if found and one.after < found[-1].before and one.first < found[-1].before:
            last = found[-1]
            found[-1] = replace(
                last,
                after=max(last.after, min(one.after, last.first)),
                last=max(last.last, one.last),
                before=max(min(last.before, one.before), max(last.last, one.last)),
                asked=last.asked | one.asked,
            )
        else:
            found.append(one)
    return found
