"""The state machine of one planned move of one stream to another worker.

    asked ── reserved ──▶ shipping ── committed ──▶ committed ── the source's last token has arrived ──▶ switched
      │                      │                          │
      ├──────────────────────┴── refused, lost, late ───┴──▶ stayed     the source continues as if nothing had happened
      └───────────────────────── the source failed ────────▶ replayed   another worker computes it again

The frontend is the arbiter: it accepts tokens of one attempt at a time, and no other process needs to know which.

The target reports the tokens that it received from the source. They are compared, not accepted. The stream switches to the
target only when the source itself has sent exactly the same tokens. If they differ, or the source has continued meanwhile,
the stream stays. A lost source never delivers its last tokens. Only then does the caller accept them from the target's
report, as if the source had sent them.
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
    """The target has reserved room for the stream."""


@dataclass(frozen=True, slots=True)
class MigrationDeclined:
    """The source or the target declined. A declining target has released the stream; a declining source continues decoding."""

    by: Literal["source", "target"]
    why: str


@dataclass(frozen=True, slots=True)
class TargetCommitted:
    """The target has received everything and decodes. `tokens`: those that the source generated since the reservation request."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceProgressed:
    """The source may have generated more tokens."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The target is unreachable, or has ended the stream that it had committed."""

    why: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The move takes too long or has become pointless. Nothing is lost yet, and the stream stays where it is."""

    why: str


@dataclass(frozen=True, slots=True)
class SourceLeft:
    """The stream left its source in another way: it failed there, or (`over`) it has ended."""

    over: bool


Event: TypeAlias = (
    TargetReserved | MigrationDeclined | TargetCommitted | SourceProgressed | Lost | GivenUp | SourceLeft
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The progress of one move."""

    state: State = "asked"
    tokens: tuple[int, ...] = ()  # committed
    why: str = ""  # why it failed

    @property
    def over(self) -> bool:
        """Whether the move has ended."""
        return self.state in ("switched", "stayed", "replayed")


def step(transfer: Transfer, event: Event, accepted: Sequence[int]) -> tuple[Transfer, Acts]:
    """Return the next state of a move after one event, and the actions to take.

    `accepted`: the tokens accepted from the source since the reservation request to the target.
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
    """Compare the source's own tokens with those that the target committed."""
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
