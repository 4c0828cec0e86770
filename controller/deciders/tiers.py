"""The priority tiers of requests, which determine the requests that an overload sheds first.

A request names its tier in the header `X-Priority`. The tiers are part of the controller's policy, so that all frontends
read the same tiers from the journal.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from events.decisions import Knobs

TIERS = ("premium", "standard", "best_effort")  # best first
TIER_DEFAULT = "standard"


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of a fleet, the most urgent first, and the default tier."""

    names: tuple[str, ...] = TIERS
    default: str = TIER_DEFAULT

    @classmethod
    def of(cls, policy: Mapping[str, Any] | None) -> "Tiers":
        """Return the tiers of a policy in plain JSON values, as `PolicyAdopted` carries it.

        The default tiers are returned if the policy is None or names no tiers.
        """
        degradation = (policy or {}).get("degradation") or {}
        names = tuple(str(name) for name in degradation.get("priority_tiers") or TIERS)
        return cls(names, str(degradation.get("tier_default") or TIER_DEFAULT))

    def tier_of(self, name: str | None) -> tuple[str, bool]:
        """Return the tier of a request with priority `name`, and whether this name is known.

        An unknown name gives the lowest tier, and no name gives the default tier.
        """
        tier = (name or "").strip().lower() or self.default
        return (tier, True) if tier in self.names else (self.names[-1], False)

    def rank(self, tier: str) -> int:
        """Return how many tiers are more urgent than this tier. A tier that no longer exists comes after all others."""
        return self.names.index(tier) if tier in self.names else len(self.names)

    def is_last(self, tier: str) -> bool:
        """Return whether requests of a tier are shed and preempted first.

        This is true for the lowest tier and for a tier that no longer exists. It is false if the fleet has only one tier.
        """
        return len(self.names) > 1 and self.rank(tier) >= len(self.names) - 1

    def sheds(self, knobs: Knobs, tier: str) -> bool:
        """Return whether `knobs` (the settings of a degradation level) shed requests of this tier.

        The tier `knobs.shed_tier` and all lower tiers are shed. If `knobs.shed_tier` is not a tier of the fleet, only the lowest
        tier is shed, so that the setting still has an effect.
        """
        if knobs.shed_tier is None:
            return False
        known = knobs.shed_tier in self.names
        return self.rank(tier) >= (self.rank(knobs.shed_tier) if known else len(self.names) - 1)
