"""One live process of the fleet, and the kinds and version that it knows."""

from dataclasses import dataclass

from events.versions import ANNOUNCES_NOTHING, InForce, Known


@dataclass(frozen=True, slots=True)
class KnownProcess:
    """One live process."""

    role: str
    name: str
    known: Known

    @property
    def announces(self) -> bool:
        """Whether it announces what it knows."""
        return self.known is not ANNOUNCES_NOTHING

    def lacks(self, force: InForce) -> frozenset[str]:
        """Return the kinds that it does not know."""
        return force.kinds - self.known.kinds

    def too_old_for(self, version: int) -> bool:
        """Whether it does not know this version of the deciders. A process that neither decides nor reads decisions has none."""
        return not self.announces or 0 < self.known.deciders_version < version
