"""One try to answer a request, at one worker: the first, or one that goes on where another one ended."""

from typing import Any

import msgspec

from controller.router.endpoints import Endpoint


class Attempt(msgspec.Struct, eq=False):
    """Where one try runs, and under which numbers it is counted there. It begins when it was sent, and is never changed."""

    endpoint: Endpoint
    rank: int | None  # the one of several DP ranks that it is with
    stream: int  # its number on the request plane
    slot: int  # its number at the router, which counts it until it ends
    number: int  # of the tries of this answer, from 1
    routed_under: int  # the last decision of the fleet when it was routed
    breaker_epoch: int  # the last move of this frontend's own breakers then
    paid: bool  # whether it has cost budget
    before: "Attempt | None"  # the one before it
    claimed: int = 0  # prompt tokens that its worker said it had cached
    explained: dict[str, Any] | None = None  # why this worker was chosen, if that was asked
