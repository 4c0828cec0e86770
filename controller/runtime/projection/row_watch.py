"""Checks that the rows of the state store equal the fleet state that this process has folded.

A view and the projector fold the same journal, so at the same position the view and the rows must be equal. A difference is a
bug, or a manual change in the database. It is reported, and this process continues with its own state.

The rows are nearly always slightly behind the view. So the view's last states are kept, and the rows are compared with the state
at the rows' position. Keeping states is cheap, because successive states share their unchanged parts.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import structlog

from controller.deciders.fleet import DECIDERS_VERSION, Fleet
from controller.ports import StateStore
from controller.read_model.diff import RowDifference, differs_from
from controller.runtime.view import FleetView
from events.errors import HoldfastError
from events.fact import Recorded

EVERY_S = 5.0
READ_S = 3.0
KEPT_MAX = 512  # number of states kept

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class RowWatch:
    """Compares a view with the rows of the state store every few seconds."""

    view: FleetView
    store: StateStore
    _: KW_ONLY
    every_s: float = EVERY_S

    def __post_init__(self) -> None:
        self._kept: deque[tuple[int, Fleet]] = deque(maxlen=KEPT_MAX)
        self.view.listen(self._on_batch)

    def _on_batch(self, view: FleetView, batch: Sequence[Recorded]) -> None:
        self._kept.append((view.seq, view.fleet))

    async def run(self) -> None:
        """Compare until cancelled."""
        while True:
            await asyncio.sleep(self.every_s)
            try:
                await self.compare()
            except (HoldfastError, TimeoutError) as error:  # a failed check must not stop the process
                log.debug("rows_not_compared", why=str(error))

    async def compare(self) -> list[RowDifference] | None:
        """Read the rows, and return and log their differences from the view.

        None if a comparison is impossible: the view has kept no state at the rows' position, or another deciders version wrote
        the rows.
        """
        async with asyncio.timeout(READ_S):
            reading = await self.store.read_status()
        fleet = next((fleet for seq, fleet in self._kept if seq == reading.position.seq), None)
        if fleet is None or reading.position.deciders_version not in (0, DECIDERS_VERSION):
            return None  # during an upgrade, another deciders version folds the same events to other rows
        # in a thread, because the rows of a thousand workers would block the event loop
        found = await asyncio.to_thread(lambda: list(differs_from(fleet, reading.rows)))
        for difference in found:
            log.error("rows_differ_from_the_fold", seq=reading.position.seq, difference=str(difference))
        return found
