"""Which tiers of requests are there, and which are let go first? A request names its own with `X-Priority`.

The controller's policy has them, so that all frontends read the same ones off the journal.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from events.decisions import Knobs

TIERS = ("premium", "standard", "best_effort")  # best first
TIER_DEFAULT = "standard"


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of a fleet, best first, and that of requests that name none."""

    names: tuple[str, ...] = TIERS
    default: str = TIER_DEFAULT

    @classmethod
    def of(cls, policy: Mapping[str, Any] | None) -> "Tiers":
        """Return those of a policy, as `PolicyAdopted` carries it. Where it says nothing of them, or nobody has
        adopted one yet, they are the usual ones."""
        degradation = (policy or {}).get("degradation") or {}
        names = tuple(str(name) for name in degradation.get("priority_tiers") or TIERS)
        return cls(names, str(degradation.get("tier_default") or TIER_DEFAULT))

    def asked(self, name: str | None) -> tuple[str, bool]:
        """Return the tier that a request's priority names, and whether the name was known; an unknown one is the lowest."""
        wanted = (name or "").strip().lower() or self.default
        return (wanted, True) if wanted in self.names else (self.names[-1], False)

    def rank(self, tier: str) -> int:
        """Return how urgent a tier is: 0 is the best; one that is none any more comes after all others."""
        return self.names.index(tier) if tier in self.names else len(self.names)

    def is_last(self, tier: str) -> bool:
        """Return whether a tier comes after all others: it is shed, and put off, before them."""
        return len(self.names) > 1 and self.rank(tier) >= len(self.names) - 1

    def sheds(self, knobs: Knobs, tier: str) -> bool:
        """Return whether these knobs shed a request of this tier: the shed tier, and all below it.

        A shed tier of which we do not know sheds the lowest: what sheds least, and yet something.
        """
        if knobs.shed_tier is None:
            return False
        known = knobs.shed_tier in self.names
        return self.rank(tier) >= (self.rank(knobs.shed_tier) if known else len(self.names) - 1)
