"""Fact kinds and deciders versions: what this release knows, and what a mixed fleet may use.

A fleet is upgraded process by process, and a reader of an older release stops at a kind that it does not know. So the leading
controller decides what is *in force*: the kinds that may be written, and the version of the deciders (the code that makes
decisions). The decision `PolicyAdopted` carries the result. A process announces what it knows (`Known`). A process that announces
nothing knows exactly what release 0.2.0 knew.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from events import decisions
from events.fact import Decision, Fact, Observation
from events.frozen import replace
from events.json_types import Json, JsonView
from events.observations import canaries, journal, planning, requests, workers


def _all_kinds() -> dict[str, type[Fact]]:
    found: dict[str, type[Fact]] = {}
    bases = {Fact, Observation, Decision}
    for module in (workers, canaries, requests, planning, journal, decisions):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Fact) and value not in bases:
                found[value.kind()] = value
    shared = {base for kind in found.values() for base in kind.__mro__[1:]}
    return {name: kind for name, kind in found.items() if kind not in shared}


KINDS: Mapping[str, type[Fact]] = _all_kinds()
"""Every kind of this release, by its name on the wire."""

_OF_0_2_0 = """
    absorbed breaker_closed breaker_half_opened breaker_opened canary_failed canary_passed canary_slow chaos_injected
    degradation_changed device_faulted device_recovered drain_ended drain_finished drain_requested drain_started
    engine_faulted exposure_unknown golden_agreed golden_disputed golden_proposed golden_retired health_changed
    incident_closed incident_opened move_requested observer_blind panic_began panic_ended policy_adopted
    request_abandoned request_exposed request_failed request_migrated requests_rejected requests_served
    resume_requested shutdown_began weight_capped worker_heard worker_joined worker_left worker_silent worker_slow
    worker_slow_cleared
"""
_OF_VERSION_5 = """
    busy_thresholds_set capacity_reported command_refused event_quarantined intrusion_refused request_poisonous
    request_preempted request_resumed request_suspected restart_requested scale_applied scale_proposed scale_set
    snapshot_kept spare_activated spare_released traffic_reported worker_awaited worker_forgotten worker_lingered
"""
BASE_KINDS = frozenset(_OF_0_2_0.split())
"""The kinds of release 0.2.0. They are always in force."""

WITHOUT_STATEMENT: Mapping[int, frozenset[str]] = {5: frozenset(_OF_VERSION_5.split())}
"""The kinds that a `PolicyAdopted` decision without the field `kinds` puts in force, by the deciders version of the decision.
After 0.2.0, only deciders version 5 wrote such decisions."""


@cache
def new_kinds() -> frozenset[str]:
    """Return the kinds that this release may write and that 0.2.0 does not know. Each enum value that 0.2.0 does not know also
    counts as a kind, under its `NewWord.name`."""
    return frozenset(KINDS) - BASE_KINDS | {new.name for new in NEW_WORDS}


def release() -> str:
    """Return the installed release for display, or "unknown"."""
    try:
        return version("holdfast")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class Known:
    """The fact kinds and the version of the deciders (the code that makes decisions) that one process announces as known."""

    kinds: frozenset[str] = frozenset()  # kinds newer than 0.2.0
    deciders_version: int = 0  # 0: the process neither decides nor reads decisions
    release: str = ""  # for display; empty: 0.2.0, or a process that announces nothing

    @classmethod
    def ours(cls, deciders_version: int = 0) -> "Known":
        """Return the kinds and the deciders version that this release knows. A process that makes no decisions passes 0 as its
        deciders version."""
        return cls(new_kinds(), deciders_version, release())

    def as_body(self) -> Json:
        """Return the announcement as a JSON object for the broker."""
        return {
            "kinds": sorted(self.kinds),
            "deciders_version": self.deciders_version,
            "release": self.release,
        }

    @classmethod
    def of_body(cls, body: JsonView) -> "Known":
        """Parse an announcement in the form of `as_body`. Raise KeyError, TypeError or ValueError if it has another form."""
        return cls(names(body["kinds"]), int(body["deciders_version"]), str(body["release"])[:NAME_CHARS_MAX])


ANNOUNCES_NOTHING = Known()
NAME_CHARS_MAX = 100
NAMES_MAX = 1000  # kinds in one announcement


def names(found: object) -> frozenset[str]:
    """Return the names of kinds in a decoded message. Raise ValueError if `found` is not a list of at most 1,000 names."""
    if not isinstance(found, list | tuple) or len(found) > NAMES_MAX:
        raise ValueError(f"expected a list of at most {NAMES_MAX} kinds")
    if not all(isinstance(name, str) and len(name) <= NAME_CHARS_MAX for name in found):
        raise ValueError(f"expected kinds to be strings of at most {NAME_CHARS_MAX} characters")
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class InForce:
    """The fact kinds that the fleet may write, and the version of the deciders (the code that makes decisions) that the fleet
    uses.

    `stated` is the field `kinds` of the `PolicyAdopted` decision. None stands for a decision without that field.
    """

    stated: tuple[str, ...] | None
    deciders_version: int
    by: str = ""  # operator that allowed the kinds early; empty: the leader saw that every process knows them
    command: str = ""  # id of the operator's command

    @classmethod
    def of(cls, kinds: Iterable[str], deciders_version: int, by: str = "", command: str = "") -> "InForce":
        """Create an InForce. `kinds` are the kinds newer than 0.2.0 that the fleet may write."""
        return cls(tuple(sorted(kinds)), deciders_version, by, command)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds newer than 0.2.0 that the fleet may write."""
        return stated_kinds(self.stated, self.deciders_version)


def stated_kinds(stated: Iterable[str] | None, deciders_version: int) -> frozenset[str]:
    """Return the kinds newer than 0.2.0 that a `PolicyAdopted` decision puts in force.

    `stated` is the decision's field `kinds`. If the decision has no such field, `stated` is None, and the decision's deciders
    version determines the kinds.
    """
    if stated is None:
        return WITHOUT_STATEMENT.get(deciders_version, frozenset())
    return frozenset(stated)


@dataclass(frozen=True, slots=True)
class NewWord:
    """A new value ("word") of an enum field in a kind of 0.2.0, and the older word that replaces it while it is not in force.

    A reader of an older release stops at an unknown word, as at an unknown kind. So a new word is announced and put in force
    like a kind, under its `name`. Until then an observation carries the older word. A new word in a decision needs a new
    version of the deciders instead.
    """

    kind: str
    field: str
    word: str
    # a word that older releases know, or a new word of an earlier release that NEW_WORDS lists after this one
    instead: str

    @property
    def name(self) -> str:
        """The name under which the word is announced and put in force, in the same list as the kinds."""
        return f"{self.kind}.{self.field}={self.word}"


NEW_WORDS: tuple[NewWord, ...] = ()
"""All new enum values, the newest first. Empty, because no kind of 0.2.0 has gained a value yet.
`tests/events/facts/test_words.py` fails if a value is added to a kind but not here."""


def older(
    fact: Observation, in_force: frozenset[str], new_words: Iterable[NewWord] = NEW_WORDS
) -> Observation:
    """Return the fact with each enum value that is not in force replaced by its older value."""
    for new in new_words:
        if new.kind == fact.kind() and getattr(fact, new.field) == new.word and new.name not in in_force:
            fact = replace(fact, **{new.field: new.instead})
    return fact
