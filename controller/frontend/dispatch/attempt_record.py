"""The record of one attempt outside the state machine."""

from typing import Any

import msgspec

from controller.router.endpoints import Endpoint


class Dispatch(msgspec.Struct, eq=False):
    """An attempt as it is counted outside the machine: where it runs, and under which numbers. It never changes."""

    endpoint: Endpoint
    rank: int | None  # the one of several DP ranks
    stream: int  # its number on the request plane
    slot: int  # its number in the slot tracker
    routed_under: int  # the fleet's last decision when it was routed
    breaker_epoch: int  # the last move of this frontend's own breakers then
    before: "Dispatch | None"
    claimed: int = 0  # prompt tokens that its worker said it had cached
    explained: dict[str, Any] | None = None  # why this worker was chosen, if that was asked
