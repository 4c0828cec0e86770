"""What becomes of an answer whose tokens from some index on may be wrong, because the worker that fed it was?

`on_corruption` says it: `continue` goes on from what was accepted, and starts over where the client has seen nothing of
what may be wrong; `restart` starts over, and ends with an error where the client has seen some; `error` always ends.
"""

from dataclasses import dataclass
from typing import TypeAlias

from controller.frontend.settings import OnCorruption


@dataclass(frozen=True, slots=True)
class EndInError:
    """The client is told."""


@dataclass(frozen=True, slots=True)
class Keep:
    """It goes on as it is: where it is still with that worker, all of that worker's answers are moved together."""


@dataclass(frozen=True, slots=True)
class ComputeAgain:
    """What was accepted stays; the KV cache that came from that worker does not."""


@dataclass(frozen=True, slots=True)
class StartOver:
    """Only the first `keep` tokens stay, and another worker goes on behind them."""

    keep: int


CorruptionResponse: TypeAlias = EndInError | Keep | ComputeAgain | StartOver


def respond(
    setting: OnCorruption,
    *,
    first: int,
    seen: int,
    on_source: bool,
    carried: bool,
    text: bool,
    stays: bool = False,
) -> CorruptionResponse:
    """Return what becomes of an answer whose tokens from index `first` on may be wrong.

    `seen`: how many tokens the client may have seen; `on_source`: it is still with that worker; `carried`: it goes on
    with a KV cache from there; `text`: some of it came as text, and where that can be cut is not known; `stays`: that worker
    serves on, as the last one of its model.
    """
    shown = seen > first
    if setting == "error" or (setting == "restart" and shown):
        return EndInError()
    if stays:
        return Keep()
    if not shown:
        return StartOver(0 if text else first)
    return ComputeAgain() if carried and not on_source else Keep()
