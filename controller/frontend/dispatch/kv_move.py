"""The KV transfer of one stream: a planned move to another worker together with the KV cache.

`controller.migration.planned_move`, a part of the request state machine, decides the order of the steps.
"""

from dataclasses import dataclass, field

from controller.frontend.request.effects import TransferOver
from controller.frontend.request.failures import Failure, PlannedCause
from controller.frontend.request.state import Carried, Move
from controller.migration.cost import MigrationCost
from controller.ports import TransferSink
from controller.router.endpoints import Endpoint
from events.wire import Chunk, Committed, Reserved

HELD_MAX = 1024  # chunks of the target that are buffered until the source's last tokens arrive


@dataclass(eq=False, repr=False, kw_only=True)
class KvMove(TransferSink):
    """The state of one KV transfer in the frontend.

    Until the switch to the target, the target's chunks are buffered in `held`, because the source's last tokens come first. A
    subclass processes the frames of source and target.
    """

    source: Endpoint
    source_stream: int
    base: int  # number of accepted tokens when room at the target was requested
    target: Endpoint
    rank: int  # DP rank at the target
    cause: PlannedCause
    began_at: float
    stream: int = 0  # stream number at the target
    offer: Reserved | None = None
    commit: Committed | None = None
    held: list[Chunk] = field(default_factory=list)
    predicted_ms: float | None = None
    target_failed: bool = False
    cheaper: MigrationCost | None = None  # cost of recomputing at the target, given what it has cached

    def ended(self, over: TransferOver) -> None:
        """Handle the end of the transfer; `over` states its outcome."""
        raise NotImplementedError

    def move(self, tokens: int) -> Move:
        """Return the move to record after the target's commit. `tokens`: number of tokens accepted so far."""
        why, commit = Failure(self.cause, ""), self.commit
        assert commit is not None
        carried = Carried(commit.bytes, commit.blocks, commit.link)
        return Move(why, why, self.source.server, self.began_at, tokens, carried, self.predicted_ms)
