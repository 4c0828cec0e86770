"""Do the rows of the state store say what this process believes?

A view and the projector fold the same journal, so at the same position they must agree. A difference there is a
fault of ours, or somebody's hand in the database: it is reported, and the fold goes on being believed.

What a reader would get wrong: the rows are nearly always a little behind the view. So the view's last states are
kept for a while (they share what did not change), and the rows are compared with the one of their own position.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from controller.deciders.fleet import DECIDERS_VERSION, Fleet
from controller.ports import RowsRead, StateStore
from controller.read_model.diff import RowDifference, differs_from
from controller.runtime.view import FleetView
from events.errors import HoldfastError
from events.fact import Recorded

EVERY_S = 5.0
READ_S = 3.0
KEPT_MAX = 512  # states remembered

log = structlog.get_logger(__name__)


class RowWatch:
    """Compares a view with the rows every few seconds."""

    def __init__(
        self,
        view: FleetView,
        store: StateStore,
        *,
        every_s: float = EVERY_S,
        differ: Callable[[RowDifference], None] = lambda difference: None,
    ) -> None:
        self._store = store
        self._every_s = every_s
        self._differ = differ
        self._kept: deque[tuple[int, Fleet]] = deque(maxlen=KEPT_MAX)
        view.listen(self._absorbed)

    def _absorbed(self, view: FleetView, batch: Sequence[Recorded]) -> None:
        self._kept.append((view.seq, view.fleet))

    async def run(self) -> None:
        """Compare for ever."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.compare()
            except (
                HoldfastError,
                TimeoutError,
            ) as error:  # whoever only looks must not fall over what he sees
                log.debug("rows_not_compared", why=str(error))

    async def compare(self) -> list[RowDifference] | None:
        """Read the rows and return where they differ; None if the view was never at exactly their position."""
        async with asyncio.timeout(READ_S):
            reading = await self._store.read_status()
        fleet = next((fleet for seq, fleet in self._kept if seq == reading.position.seq), None)
        if fleet is None or reading.position.deciders_version not in (0, DECIDERS_VERSION):
            return None  # other deciders fold to other rows: a fleet in the middle of an upgrade
        found = await asyncio.to_thread(
            _all, fleet, reading
        )  # a thousand workers' rows would hold up the loop
        for difference in found:
            log.error("rows_differ_from_the_fold", seq=reading.position.seq, difference=str(difference))
            self._differ(difference)
        return found


def _all(fleet: Fleet, reading: RowsRead) -> list[RowDifference]:
    return list(differs_from(fleet, reading.rows))
