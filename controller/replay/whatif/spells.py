"""Finds spells: the periods in which a worker answered canaries wrongly, slowly or not at all.

    good ✓         ✗ ✗ ✗        ✓ good
           └─ began ─┘   └─ ended ─┘

✓ is a good answer, ✗ a bad one. A spell began at some time between the last good and the first bad answer. It ended at some
time between the last bad and the next good answer. A `place` from 0 to 1 selects a time within such a gap: 0 is its beginning,
and 1 its end.

A spell of wrong answers covers only the canaries that were answered wrongly, because other canaries may be answered correctly
at that time. A spell of missing or slow answers covers all canaries.
"""

from dataclasses import dataclass, replace

from controller.replay.whatif.journal_stretch import MUTE, SLOW, WRONG, RecordedCanaries
from events.observations import CanaryFailed, CanarySlow


@dataclass(frozen=True, slots=True)
class Spell:
    """A period in which a worker answered canaries badly. Times are seconds since 1970."""

    after: float  # when the last canary with a good answer before the spell was sent, or the first canary
    first: float  # when the first canary with a bad answer was sent
    last: float  # when the last canary with a bad answer was sent
    before: float  # when the next canary with a good answer was sent; infinity: there was none
    said: int  # kind of the bad answers: SLOW, WRONG or MUTE
    asked: frozenset[int]  # indices of the canaries that the spell covers; empty: all canaries
    fact: CanaryFailed | CanarySlow  # the first bad answer
    # seconds from sending the first canary with a bad answer until the journal recorded the answer
    took: float

    def began(self, place: float) -> float:
        """Return when the spell began. `place`, 0 to 1, selects a time between the last good and the first bad answer."""
        if self.momentary and place < 1:
            return self.first
        return self.after + (self.first - self.after) * place

    def ended(self, place: float) -> float:
        """Return when the spell ended. `place`, 0 to 1, selects a time between the last bad and the next good answer.

        If no good answer followed, the result is the time right after the last bad answer for `place` 0, and infinity for any
        other `place`."""
        if self.momentary and place < 1:
            return self.first + self.took
        if self.before == float("inf"):
            return self.last + 1e-6 if place == 0 else self.before
        return max(self.last + 1e-6, self.last + (self.before - self.last) * place)

    @property
    def momentary(self) -> bool:
        """Whether the spell is a single slow answer. Most likely, no other answer at that time would have been slow.

        If `place` is below 1, the spell therefore covers only the time of this answer."""
        return self.said == SLOW and self.first == self.last

    def detects(self, canary: int) -> bool:
        """Return whether a canary would be answered badly during the spell.

        `canary` is an index in `RecordedCanaries.names`."""
        return not self.asked or canary in self.asked


def spells(recorded: RecordedCanaries) -> list[Spell]:
    """Return the spells (periods of bad canary answers) of one worker instance, sorted by their first bad answer."""
    general = [*_runs(recorded, range(len(recorded)), MUTE), *_runs(recorded, range(len(recorded)), SLOW)]
    wrong = [run for canary in range(len(recorded.names)) for run in _wrong(recorded, canary)]
    return sorted([*general, *_joined(wrong)], key=lambda one: one.first)


def _wrong(recorded: RecordedCanaries, canary: int) -> list[Spell]:
    places = [n for n in range(len(recorded)) if recorded.asked[n] == canary and recorded.said[n] != MUTE]
    return _runs(recorded, places, WRONG, frozenset({canary}))


def _runs(
    recorded: RecordedCanaries, places: range | list[int], result: int, canaries: frozenset[int] = frozenset()
) -> list[Spell]:
    """Return one spell for each run of consecutive canaries with the given result.

    `places` are the indices of the results to look at. `canaries` are the canaries that the spells cover; empty means all."""
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
    """Merge overlapping spells of different canaries, because most likely one cause made all these answers wrong."""
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
