"""One stream that moves to another worker with its KV cache: its state and its frames.

`controller.migration.planned_move`, a part of the request state machine, decides which step may be taken when.
"""

from dataclasses import dataclass, field

from controller.frontend.request.effects import TransferOver
from controller.frontend.request.failures import Failure, PlannedCause
from controller.frontend.request.state import Carried, Move
from controller.migration.cost import MigrationCost
from controller.ports import TransferSink
from controller.router.endpoints import Endpoint
from events.wire import Chunk, Committed, Reserved

HELD_MAX = 1024  # chunks of the target held until the source's last tokens arrive


@dataclass(eq=False, repr=False, kw_only=True)
class KvMove(TransferSink):
    """The state of one KV transfer in the frontend.

    Until the stream continues at the target, the target's chunks are held: the source's last tokens come first. A subclass
    reads the frames of both workers.
    """

    source: Endpoint
    source_stream: int
    base: int  # number of accepted tokens when room at the target was requested
    target: Endpoint
    rank: int  # DP rank at the target
    cause: PlannedCause
    began_at: float
    stream: int = 0  # at the target
    offer: Reserved | None = None
    commit: Committed | None = None
    held: list[Chunk] = field(default_factory=list)
    predicted_ms: float | None = None
    target_failed: bool = False
    cheaper: MigrationCost | None = None  # cost of recomputing at the target, given what it has cached

    def ended(self, over: TransferOver) -> None:
        """Handle the end of the transfer and its outcome."""
        raise NotImplementedError

    def move(self, tokens: int) -> Move:
        """Return the move that the target's commit completes. `tokens`: number of tokens accepted so far."""
        why, commit = Failure(self.cause, ""), self.commit
        assert commit is not None
        carried = Carried(commit.bytes, commit.blocks, commit.link)
        return Move(why, why, self.source.server, self.began_at, tokens, carried, self.predicted_ms)
