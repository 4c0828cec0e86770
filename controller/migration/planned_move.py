"""The state machine of one planned move of one stream to another worker.

    asked ── reserved ──▶ shipping ── committed ──▶ committed ── the source's last token has arrived ──▶ switched
      │                      │                          │
      ├──────────────────────┴── refused, lost, late ───┴──▶ stayed     the source continues as if nothing had happened
      └───────────────────────── the source failed ────────▶ replayed   another worker computes the answer again

The frontend decides whether the stream's tokens are accepted from the source or from the target. No other process needs to
know this decision.

When the target commits, it reports the tokens that the source generated during the move. The frontend compares these with the
tokens that it received from the source. The stream switches to the target only if the two sequences of tokens are equal. If
the two sequences differ, or if the source has continued after the commit, the stream stays at the source. If the source is
lost, it cannot send its last tokens. Only in this case, the caller accepts the last tokens from the target's report.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

State = Literal["asked", "shipping", "committed", "switched", "stayed", "replayed"]
Act = Literal[
    "ship",  # command the source to send its KV cache to the target's address
    "switch",  # accept the target's tokens from now on, and cancel the source's stream
    "cancel",  # release the target's reservation or stream
    "stay",  # command the source to continue decoding
]
Acts: TypeAlias = tuple[Act, ...]


@dataclass(frozen=True, slots=True)
class TargetReserved:
    """The target has reserved memory and a slot for the stream."""


@dataclass(frozen=True, slots=True)
class MigrationDeclined:
    """The source or the target declined the move.

    A target that declines has released its reservation. A source that declines continues to decode.
    """

    by: Literal["source", "target"]
    why: str


@dataclass(frozen=True, slots=True)
class TargetCommitted:
    """The target has received the whole KV cache and decodes.

    `tokens` are those that the source generated since the reservation request.
    """

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceProgressed:
    """The frontend may have accepted more tokens from the source since the previous event."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The target is unreachable, or has ended the stream that it had committed."""

    why: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The frontend ends the move, and the stream stays at the source.

    The reason is that the move takes too long, or has no purpose any more.
    """

    why: str


@dataclass(frozen=True, slots=True)
class SourceLeft:
    """The stream is no longer at its source.

    `over` is true if the stream has ended, and false if it failed there.
    """

    over: bool


Event: TypeAlias = (
    TargetReserved | MigrationDeclined | TargetCommitted | SourceProgressed | Lost | GivenUp | SourceLeft
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The state of one planned move."""

    state: State = "asked"
    tokens: tuple[int, ...] = ()  # committed
    why: str = ""  # why it failed

    @property
    def over(self) -> bool:
        """Whether the move has ended, successfully or not."""
        return self.state in ("switched", "stayed", "replayed")


def step(transfer: Transfer, event: Event, accepted: Sequence[int]) -> tuple[Transfer, Acts]:
    """Return the next state of a move after an event, and the actions to take. An ended move does not change.

    `accepted` holds the tokens that the frontend accepted from the source since it requested the reservation.
    """
    if transfer.over:
        return transfer, ()
    shipping = transfer.state != "asked"
    match event:
        case TargetReserved():
            return (transfer, ()) if shipping else (replace(transfer, state="shipping"), ("ship",))
        case TargetCommitted(tokens):
            if transfer.state != "shipping":
                return _stayed(transfer, "the target committed before anything was sent", "cancel", "stay")
            return _compare(replace(transfer, state="committed", tokens=tokens), accepted)
        case SourceProgressed():
            return _compare(transfer, accepted) if transfer.state == "committed" else (transfer, ())
        case MigrationDeclined(by, why) if by == "source":
            return _stayed(transfer, why, "cancel")
        case MigrationDeclined(why=why) | Lost(why):
            return _stayed(transfer, why, "stay") if shipping else _stayed(transfer, why)
        case GivenUp(why):
            return _stayed(transfer, why, "cancel", "stay") if shipping else _stayed(transfer, why, "cancel")
        case SourceLeft(over):
            return replace(transfer, state="stayed" if over else "replayed"), ("cancel",)


def _compare(transfer: Transfer, accepted: Sequence[int]) -> tuple[Transfer, Acts]:
    """Compare the tokens that the source sent with those that the target reported when it committed.

    If both sequences of tokens are equal, the stream switches. If they differ, it stays at the source. As long as the source
    has sent only the first part of the reported tokens, the move waits.
    """
    tokens = transfer.tokens
    if tuple(accepted) == tokens:
        return replace(transfer, state="switched"), ("switch",)
    if len(accepted) < len(tokens) and tuple(accepted) == tokens[: len(accepted)]:
        return transfer, ()
    continued = tuple(accepted[: len(tokens)]) == tokens
    why = "the source has continued meanwhile" if continued else "source and target report different tokens"
    return _stayed(transfer, why, "cancel", "stay")


def _stayed(transfer: Transfer, why: str, *acts: Act) -> tuple[Transfer, Acts]:
    return replace(transfer, state="stayed", why=why), acts
