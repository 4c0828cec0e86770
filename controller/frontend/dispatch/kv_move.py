"""One stream that is on its way to another worker with its KV cache: its record, and what is sent for it on the request plane.

Which step may be taken when is decided by `controller.migration.live`, a part of the request state machine.
"""

from dataclasses import dataclass, field

from controller.frontend.request.effects import TransferOver
from controller.frontend.request.failures import Failure, PlannedCause
from controller.frontend.request.state import Carried, Move
from controller.migration.cost import MigrationCost
from controller.ports import TransferSink
from controller.router.endpoints import Endpoint
from events.wire import Chunk, Committed, Reserved

HELD_MAX = 1024  # chunks of the target that wait for the source's last tokens


@dataclass(eq=False, repr=False, kw_only=True)
class KvMove(TransferSink):
    """What the frontend knows of one KV transfer. Until the stream continues at the target, the target's chunks are held back:
    the source's last tokens come first. A subclass reads the frames of both workers."""

    source: Endpoint
    source_stream: int
    base: int  # tokens that were accepted when the target was asked
    target: Endpoint
    rank: int  # of the target's DP ranks
    cause: PlannedCause
    began_at: float
    stream: int = 0  # at the target
    offer: Reserved | None = None
    commit: Committed | None = None
    held: list[Chunk] = field(default_factory=list)
    predicted_ms: float | None = None
    target_failed: bool = False
    cheaper: MigrationCost | None = None  # recomputing at the target, with what it has cached

    def ended(self, over: TransferOver) -> None:
        """Take note of the transfer's end and its outcome."""
        raise NotImplementedError

    def move(self, tokens: int) -> Move:
        """Return the move that the target's commit completes; `tokens`: accepted until now."""
        why, commit = Failure(self.cause, ""), self.commit
        assert commit is not None
        carried = Carried(commit.bytes, commit.blocks, commit.link)
        return Move(why, why, self.source.server, self.began_at, tokens, carried, self.predicted_ms)
