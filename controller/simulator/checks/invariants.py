"""What must never happen, or must always happen in the end. Each invariant is one sentence and one check.

`on` says when it is checked: before a decision is written into the ledger, after an event was recorded, after an
append, after a process folded a batch, when a request was routed, when its outcome is in, when a worker was accused
of silence, when a planner is about to propose, once a second, and at the end. A check returns what it saw if the
sentence is false, and nothing if it holds. Each raises nothing: the watch ends the run.
"""

from collections.abc import Callable, Mapping
from typing import Any

from controller.simulator.checks import decisions as checks_decisions
from controller.simulator.checks import end as checks_end
from controller.simulator.checks import folds as checks_folds
from controller.simulator.checks import overload as checks_overload
from controller.simulator.checks import planner as checks_planner
from controller.simulator.checks import spares as checks_spares
from controller.simulator.checks import world as checks_world
from controller.simulator.checks.watch import Invariant, On


def _all(*found: tuple[str, On, Callable[..., Any], str]) -> Mapping[str, Invariant]:
    return {name: Invariant(name, on, sentence, check) for name, on, check, sentence in found}


d, f, w, e, s = checks_decisions, checks_folds, checks_world, checks_end, checks_spares
o, p = checks_overload, checks_planner

INVARIANTS: Mapping[str, Invariant] = _all(
    # The journal and its one writer.
    ("decisions_gapless", "before", d.gapless, "Decisions are numbered from 1 without a gap."),
    ("one_writer", "before", d.one_writer, "Whoever decides has read every earlier decision."),
    (
        "cause_is_real",
        "before",
        d.cause,
        "A decision's cause lies before it and concerns the same life of a worker.",
    ),
    (
        "batch_is_whole",
        "appended",
        d.whole,
        "What one append holds is exactly what is due where its controller had read.",
    ),
    ("quiescence", "appended", d.quiescent, "Right after a decision nothing more is due."),
    # Machines.
    ("dead_stays_dead", "before", d.dead, "Nothing is decided for a dead instance; only a new one lives."),
    (
        "legal_transition",
        "before",
        d.transition,
        "Health moves along the table, from where it was, at a fitting weight.",
    ),
    (
        "limits_obeyed",
        "before",
        d.limit,
        "No decision gives a worker more than its devices leave it, as far as its controller has read.",
    ),
    (
        "breaker_moves",
        "before",
        d.breaker,
        "Breakers go closed, open, half-open, and from there open or closed: one trial.",
    ),
    ("no_straggler", "before", d.straggler, "No outcome from before a breaker's last move moves it."),
    (
        "in_a_row",
        "before",
        d.in_a_row,
        "Only failures in a row open a breaker: a success between them resets the count.",
    ),
    (
        "own_instance",
        "before",
        d.own_life,
        "A fact about one life of a worker decides nothing about another.",
    ),
    (
        "policy_kept",
        "before",
        d.policy,
        "An adopted policy, read back from the journal, is the one that was adopted.",
    ),
    ("within_policy", "before", d.bounded, "Waits, trials and drains end within what the policy allows."),
    ("all_knobs", "before", d.knobs, "Every degradation level sets all four knobs to the level's values."),
    (
        "hysteresis",
        "before",
        d.hysteresis,
        "A level is left only above its entry by the margin, or with all that is provisioned, after the dwell.",
    ),
    (
        "just_conviction",
        "before",
        d.just,
        "A worker is convicted of corruption only if it was corrupt when asked, or when it gave its golden unconfirmed.",
    ),
    (
        "ejection_budget",
        "appended",
        d.budget,
        "Doubt takes no more workers of a model out of service than the budget allows.",
    ),
    (
        "lateness_keeps_one",
        "appended",
        d.lateness,
        "Lateness alone (slow answers, timeouts of an engine that goes on) never takes out all workers of a model.",
    ),
    # Spares.
    ("places_fit", "before", s.fits, "Only a spare that is well takes a place, and only a lost worker's."),
    ("places_once", "recorded", s.places, "No place is taken twice, and there are as many as there were."),
    ("spares_wait", "routed", s.waits, "No request goes to a worker that its frontend knows to be a spare."),
    ("places_filled", "tick", s.filled, "No place stays empty beside a spare while a leader lives."),
    # Overload.
    ("room_is_used", "tick", o.idle, "No worker has room while somebody waits for one that it could serve."),
    (
        "tiers_ordered",
        "routed",
        o.ordered,
        "Nobody is let in while one of a better tier waits in line.",
    ),
    ("late_is_not_sent", "routed", o.in_time, "No worker gets a request whose time in line is over."),
    ("refusal_is_no_fault", "judged", o.harmless, "That a worker has no room moves no breaker."),
    (
        "refusal_is_no_failure",
        "recorded",
        o.untold,
        "That a worker has no room is told neither as a migration nor as a loss.",
    ),
    ("everybody_answered", "end", o.answered, "Each request is answered, refused or lost once."),
    # Planners.
    ("planner_floor", "proposed", p.floor, "No planner proposes fewer workers than there must be."),
    ("planner_fresh", "proposed", p.fresh, "No planner proposes anything by a state store that is behind."),
    (
        "planner_knows",
        "proposed",
        p.knows,
        "No planner takes it for little traffic that nobody tells of any.",
    ),
    ("planner_heeds", "proposed", p.heeds, "What an operator has set holds until he releases it."),
    ("planner_in_turn", "recorded", p.in_turn, "Whoever proposes has read the proposal before."),
    (
        "planner_steady",
        "recorded",
        p.steady,
        "Proposals keep the cool-down, and their number within an hour.",
    ),
    # Folds.
    ("folds_agree", "absorbed", f.agree, "Every fold at the same position is the same."),
    (
        "fold_keeps_decisions",
        "recorded",
        f.keeps,
        "A fold shows of each worker what was last decided about it.",
    ),
    # The world.
    (
        "verdict_obeyed",
        "routed",
        w.verdict,
        "No request goes to a worker that its frontend knows to be unhealthy, draining or dead, but to a model's last one.",
    ),
    (
        "shedding_obeyed",
        "routed",
        w.shedding,
        "No new request of a model is sent while its level accepts none.",
    ),
    (
        "own_breaker",
        "judged",
        w.own_straggler,
        "No outcome of a request from before a frontend's own breaker moved moves it.",
    ),
    (
        "heard_is_not_silent",
        "accused",
        w.silent,
        "Nobody is called silent while heard, or linked to a frontend.",
    ),
    (
        "corruption_fenced",
        "tick",
        w.corrupt,
        "A corrupt worker is out of service within canaries × interval, retries and slack, unless no other worker of its model "
        "serves.",
    ),
    (
        "canaries_leave_one",
        "tick",
        w.served,
        "No model is without a serving worker because of canaries, or of a new lineage, alone.",
    ),
    (
        "acquitted_are_tried",
        "tick",
        w.acquitted,
        "A worker is tried again at once when the goldens that convicted it were outvoted, while a leader lives.",
    ),
    (
        "trials_end",
        "tick",
        w.trials,
        "An open or half-open breaker moves on when its time has come and a leader lives.",
    ),
    (
        "limits_decided",
        "tick",
        w.limits,
        "What a device leaves a worker is decided soon while a leader lives.",
    ),
    (
        "full_capacity",
        "tick",
        w.full_capacity,
        "Full capacity returns to level 0: no level lasts beyond the dwell while every worker of a model carries its full share "
        "and these carry the objective.",
    ),
    ("drains_end", "tick", w.drains, "A drain ends by its deadline while a leader lives."),
    # The end: liveness.
    ("replay_equals_live", "end", e.replay, "Folding the journal from zero gives the live fold."),
    ("snapshot_equals_replay", "end", e.snapshot, "The state store holds the fold of its position."),
    (
        "nothing_lost",
        "end",
        e.nothing_lost,
        "No acknowledged fact is missing from the journal, and none was dropped.",
    ),
    ("once_in_the_audit", "end", e.audit, "The audit table holds every event once."),
    (
        "everybody_caught_up",
        "end",
        e.caught_up,
        "All processes end at the journal's end with nothing left to say.",
    ),
    (
        "all_well",
        "end",
        e.all_well,
        "Once every fault is healed, every worker is healthy again at full weight.",
    ),
    (
        "incidents_closed",
        "end",
        e.incidents,
        "Once every fault is healed, every incident is closed and no level is left.",
    ),
)
