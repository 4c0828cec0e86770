"""One planned move of one stream: may it go on at its target now?

    asked ── reserved ──▶ shipping ── committed ──▶ committed ── the source's last token is here ──▶ switched
      │                      │                          │
      ├──────────────────────┴── refused, lost, late ───┴──▶ stayed     the source goes on, as if nothing had been
      └───────────────────────── the source failed ────────▶ replayed   another worker computes it again

The frontend is the arbiter: it takes one attempt's tokens at a time, and nobody else needs to know which.

What a reader would get wrong: what the target says that the source had said is compared, and not taken. Only when
the source's own tokens have come, exactly as many and the same, does the stream go on at the target; where they
differ, or the source has gone on by itself meanwhile, it stays. Of a source that is lost the last tokens never come:
then, and only then, who asks takes them from the target's word, as if the source had said them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

State = Literal["asked", "shipping", "committed", "switched", "stayed", "replayed"]
Act = Literal[
    "ship",  # tell the source to send, to whom the target said
    "switch",  # take the target's tokens from now on, and cancel the source's stream
    "cancel",  # give the target's reservation, or its stream, up
    "stay",  # tell the source to go on decoding
]
Acts: TypeAlias = tuple[Act, ...]


@dataclass(frozen=True, slots=True)
class TargetReserved:
    """The target keeps the room."""


@dataclass(frozen=True, slots=True)
class MigrationDeclined:
    """One of the two cannot. A target that declines has let go of the stream; a source goes on decoding."""

    by: Literal["source", "target"]
    why: str


@dataclass(frozen=True, slots=True)
class TargetCommitted:
    """The target has everything, and decodes. `tokens`: what the source said since the target was asked."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceSaid:
    """The source may have said more."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The target is out of reach, or has ended the stream that it had committed."""

    why: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """It takes too long, or has become pointless: nothing is lost yet, and it stays where it is."""

    why: str


@dataclass(frozen=True, slots=True)
class SourceLeft:
    """The stream has left its source by another way: it failed there, or (`over`) it has come to its end."""

    over: bool


Event: TypeAlias = (
    TargetReserved | MigrationDeclined | TargetCommitted | SourceSaid | Lost | GivenUp | SourceLeft
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """How far one move has got."""

    state: State = "asked"
    tokens: tuple[int, ...] = ()  # committed
    why: str = ""  # it did not come off

    @property
    def over(self) -> bool:
        """Whether nothing more can become of it."""
        return self.state in ("switched", "stayed", "replayed")


def step(transfer: Transfer, event: Event, said: Sequence[int]) -> tuple[Transfer, Acts]:
    """Return what becomes of a move by one event, and what is to be done. `said` are the tokens that were accepted from
    the source since the target was asked."""
    if transfer.over:
        return transfer, ()
    shipping = transfer.state != "asked"
    match event:
        case TargetReserved():
            return (transfer, ()) if shipping else (replace(transfer, state="shipping"), ("ship",))
        case TargetCommitted(tokens):
            if transfer.state != "shipping":
                return _stayed(transfer, "the target committed what nobody had sent", "cancel", "stay")
            return _look(replace(transfer, state="committed", tokens=tokens), said)
        case SourceSaid():
            return _look(transfer, said) if transfer.state == "committed" else (transfer, ())
        case MigrationDeclined(by, why) if by == "source":
            return _stayed(transfer, why, "cancel")
        case MigrationDeclined(why=why) | Lost(why):
            return _stayed(transfer, why, "stay") if shipping else _stayed(transfer, why)
        case GivenUp(why):
            return _stayed(transfer, why, "cancel", "stay") if shipping else _stayed(transfer, why, "cancel")
        case SourceLeft(over):
            return replace(transfer, state="stayed" if over else "replayed"), ("cancel",)


def _look(transfer: Transfer, said: Sequence[int]) -> tuple[Transfer, Acts]:
    """See whether the source's own tokens have reached what was committed."""
    tokens = transfer.tokens
    if tuple(said) == tokens:
        return replace(transfer, state="switched"), ("switch",)
    if len(said) < len(tokens) and tuple(said) == tokens[: len(said)]:
        return transfer, ()
    went_on = tuple(said[: len(tokens)]) == tokens
    why = "the source has gone on meanwhile" if went_on else "source and target do not agree on what was said"
    return _stayed(transfer, why, "cancel", "stay")


def _stayed(transfer: Transfer, why: str, *acts: Act) -> tuple[Transfer, Acts]:
    return replace(transfer, state="stayed", why=why), acts
