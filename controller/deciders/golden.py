"""The golden answers: what is the right answer to a canary, and who says so?

    (none) ── proposed ──▶ provisional ── second worker agrees ──▶ agreed ── convicts everybody
                │               │                                    │
                │               └── disputed ──▶ retired ◀── disputed ┘
                └── configured ──▶ agreed              │
                                  agreed ◀── two agree ┘   (voted again as workers join)

A golden belongs to a canary key: the same model, revision, tokenizer, engine, dtype, TP and device. A provisional one
convicts only the worker that it came from. Votes are kept per worker and survive a dispute, so that the next worker's
answer decides between the two; a worker has one vote, its latest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from events.decisions import Decision, GoldenAgreed, GoldenRetired
from events.fact import Fact
from events.observations import CanaryPassed, CanarySlow, GoldenDisputed, GoldenProposed, TopK

CONFIGURED = "configured"
VOTES_MAX = 64  # kept per golden; the oldest goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenPolicy:
    """How many different workers must give the same answer before it convicts others."""

    voters_min: int = 2


@dataclass(frozen=True, slots=True)
class Vote:
    """One worker's answer."""

    worker: str
    instance: str
    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...] = ()
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Golden:
    """The answer to one canary under one canary key, and the votes behind it."""

    canary_key: str
    canary: str
    status: Literal["provisional", "agreed", "retired"] = "provisional"
    prompt: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    top_k: tuple[TopK, ...] = ()
    margin: float = 0.0
    tolerance: float = 0.0  # of one logprob; 0: compare tokens only
    proposed_by: str = ""  # worker
    proposed_instance: str = ""
    configured: bool = False
    votes: tuple[Vote, ...] = ()
    by: tuple[str, ...] = ()  # who agreed
    disputed_by: str = ""  # worker, until a decision has answered
    moved_by: int = 0  # number of the last decision about it
    cause: str = ""
