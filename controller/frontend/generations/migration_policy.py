"""What becomes of an answer that has lost its worker? Functions of values: the generation asks, and does it.

    an attempt has failed ─┬─ only the worker's last word was missing ───────▶ Finish
                           ├─ its budget does not allow another attempt ─────▶ Abandon
                           ├─ it has brought two workers down itself ────────▶ Abandon
               ├─ for the second time in a row its connection ───▶ Park: more may be dying
               ├─ its worker fell before it had any token ───────▶ Park: it may be the reason
                           └─ else ──────────────────────────────────────────▶ GoOn
    nobody can take it ────┬─ it may bring workers down: one at a time ──────▶ Hold
                           ├─ it had not begun, and all are busy ────────────▶ LineUp
                           ├─ it had not begun, and a suspect will serve ────▶ LineUp
                           ├─ it had not begun ──────────────────────────────▶ Refuse
                           ├─ no token yet, and all are closed for too long ─▶ Refuse
                           ├─ a worker may come, come back, or stand in ─────▶ Park
                           └─ all have failed it ────────────────────────────▶ Abandon

What a reader would get wrong: a client is told the first failure since a token came, and not the last: that is the one
that everything after it was to make good.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from controller.frontend.health.poison import Held, Poisonous, Suspicion
from controller.frontend.request.failures import FULL, Failure
from controller.frontend.request.generation_request import Move
from controller.router.endpoints import Endpoint, Key
from controller.router.selection.filter import AllBusy, AllClosed, AllTried

POISONOUS = Poisonous.code
PAUSE_S = (
    0.1  # before the third attempt and later ones, where connections broke: a host's workers die together
)
SUSPECT_PAUSE_S = 0.25  # before the second: by then the other workers of a host that died are gone, too


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is complete."""

    reason: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """It ends with the error of this failure; `reason` says why nobody goes on."""

    reason: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class Park:
    """It waits for a worker, at least for this long."""

    original: Failure
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Hold:
    """It waits although there are workers, whether or not it has begun: its like may bring them down."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """Another worker goes on at once."""

    original: Failure


@dataclass(frozen=True, slots=True)
class LineUp:
    """It waits for room once more, as it did before it was let in: no worker has failed it."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The client gets the reason why no worker can take the request."""


AfterFailure: TypeAlias = Finish | Abandon | Park | GoOn
WithoutWorker: TypeAlias = Refuse | LineUp | Hold | Park | Abandon


def after_failure(
    failure: Failure,
    *,
    replaced: Failure | None,
    missing_tokens: int,
    refusal: str,
    suspicion: Suspicion = Suspicion.NONE,
) -> AfterFailure:
    """Return what becomes of an answer whose attempt has failed. `replaced`: the failure that this attempt was to make good,
    if it has brought nothing; `missing_tokens`: that the answer may still have; `refusal`: why its budget allows no more;
    `suspicion`: what the failure says of the request itself."""
    original = failure if replaced is None or replaced.planned else replaced
    if missing_tokens <= 0:
        return Finish("length")
    if suspicion is Suspicion.POISONOUS:
        return Abandon(POISONOUS, Failure(POISONOUS, failure.reason))
    if refusal:
        return Abandon(refusal, original)
    if suspicion is Suspicion.SUSPECT:
        return Park(original, SUSPECT_PAUSE_S)
    if original is not failure and failure.kind.again:
        return Park(original, PAUSE_S)
    return GoOn(original)


def is_turned_away(failure: Failure, move: Move | None, *, has_output: bool) -> bool:
    """Say whether a worker had no room for an attempt, which is no failure: it has not been begun there. Who has taken a KV cache
    over has begun."""
    return failure.reason == FULL and not has_output and (move is None or move.carried is None)


def without_worker(
    code: str,
    move: Move | None,
    *,
    may_return: bool,
    stands_in: bool = False,
    begun: bool = True,
    reopens_s: float = 0.0,
    patience_s: float = 0.0,
) -> WithoutWorker:
    """Return what becomes of an answer that nobody can take, for the reason of this `code`. `move`: what it is in the middle
    of; `may_return`: some worker that failed it may be asked again; `stands_in`: a worker that canaries keep out of service will
    serve in a moment; `begun`: its first token has come; `reopens_s`: until a closed worker takes it, inf where each has declined
    it; `patience_s`: how long it may still wait for one."""
    if code == Held.code:
        return Hold()
    if move is None:
        return LineUp() if code == AllBusy.code or stands_in else Refuse()
    if code == POISONOUS:
        return Abandon(code, Failure(POISONOUS, move.failure.reason))
    if code == AllClosed.code and not begun and not stands_in and reopens_s > patience_s:
        return Refuse()
    if move.failure.kind.patient or code != AllTried.code or may_return or stands_in:
        return Park(move.original)
    return Abandon(code, move.original)


def leaves_unhealthy(*, corrupt: bool, refusal: str, others: Collection[Key], tried: Collection[Key]) -> bool:
    """Say whether an answer leaves a worker that was taken out of service. From one that is only slow or silent it does not
    move into nowhere: it stays while its tokens come, unless one of `others` can still be tried."""
    return corrupt or (not refusal and any(key not in tried for key in others))


def same_answers(source: Endpoint, target: Endpoint, unset: Collection[str]) -> bool:
    """Return whether a target continues exactly as the source would have: both take tokens, and serve the same weights with the
    same defaults for what the client leaves out. `unset`: the sampling parameters that are left to the servers. Where neither
    names its weights, nothing is known of its defaults for these."""
    one, other = source.joined, target.joined
    same = (one.root, one.generation_config) == (other.root, other.generation_config)
    return one.exact and other.exact and same and bool(one.root or not unset)


def why_not_carried(failure: Failure, refused: str, *, under_way: bool) -> str:
    """Return why an answer's KV cache did not come along, though that was wanted; empty if nobody wanted it."""
    if under_way:
        return "its source failed meanwhile"
    return refused if failure.reason == "engine_shutdown" else ""
