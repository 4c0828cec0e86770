"""Describes each kind of fact in one English sentence. A test checks that no kind is missing."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from controller.deciders.golden import CONFIGURED
from controller.terminal_text import escape_controls
from events import decisions as d
from events import observations as o
from events.fact import Fact, Recorded, Skipped

TOKENS_SHOWN = 8  # maximum number of tokens of an answer in a sentence
MOVES_SHOWN = 6  # maximum number of breaker transitions in a sentence
SPAN_S_MAX = 1e9  # longer durations are shown as this one, which is about 30 years


def line(event: Recorded, *, date: bool = False) -> str:
    """Format an event as one line: the time by the broker's clock (with the date if `date` is set) and a sentence."""
    time = f"{event.at:%H:%M:%S.%f}"[:-3]
    return f"{f'{event.at:%Y-%m-%d} {time} UTC' if date else time} {sentence(event.fact)}"


def sentence(fact: Fact) -> str:
    """Describe a fact in one sentence without a full stop, on one line and without control characters."""
    return escape_controls(_text(fact, SENTENCES.get(type(fact))).replace("\n", " "))


def _text(fact: Fact, template: "str | Callable[[Any], str] | None") -> str:
    if template is None:
        return f"{fact.kind()}: {fact}"
    return template.format(f=fact) if isinstance(template, str) else template(fact)


def span(seconds: float) -> str:
    """Format a duration in seconds as text, such as "850 ms", "4.2 s" or "0:12:00"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return str(timedelta(seconds=round(min(seconds, SPAN_S_MAX))))


def count(number: int, thing: str) -> str:
    """Format a number with a noun, such as "1 token" or "2 tokens"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def about(subject: str) -> str:
    """Format an incident's subject as text, such as "worker w0" for the subject `worker:w0`."""
    return subject.replace(":", " ", 1)


def _name(source: str) -> str:
    """Return the process name in an event source of the form `role:name:instance`."""
    return source.split(":")[1] if ":" in source else source


def _tokens(tokens: tuple[int, ...]) -> str:
    shown = " ".join(map(str, tokens[:TOKENS_SHOWN]))
    return f"{shown} …" if len(tokens) > TOKENS_SHOWN else shown or "nothing"


def _difference(expected: tuple[int, ...], got: tuple[int, ...]) -> str:
    """Describe how an answer differs from the expected one, with a few tokens of each.

    If the answers differ near the start, the text gives the first tokens of both. If they differ later, the text gives the
    position of the first different token, and a few tokens from there on."""
    first = next((n for n, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    if first is None:
        first = min(len(expected), len(got))
    if first < TOKENS_SHOWN - 2:
        return f"expected {_tokens(expected)}, got {_tokens(got)}"
    return f"at token {first}: expected {_tokens(expected[first : first + 3])}, got {_tokens(got[first : first + 3])}"


def _joined(f: o.WorkerJoined) -> str:
    device = f.device if f.tp == 1 else f"{f.tp} ranks, {f.device}"
    return f"{f.worker} joined ({f.model} on {f.engine} {f.engine_version}, {device}, pid {f.pid}) at {f.url}"


def _left(f: o.WorkerLeft) -> str:
    if f.exit is not None and (f.exit < 0 or (f.mode == "immediate" and f.exit > 128)):
        return f"{f.worker} was killed by signal {-f.exit if f.exit < 0 else f.exit - 128}"
    return f"{f.worker} left ({f.mode.replace('_', ' ')}{'' if f.exit is None else f', exit {f.exit}'})"


def _drain_requested(f: o.DrainRequested) -> str:
    within = "" if f.deadline_s is None else f" within {span(f.deadline_s)}"
    return f"{f.by or 'an operator'} asked {f.worker} to drain{within}"


def _move_requested(f: o.MoveRequested) -> str:
    return f"{f.by or 'an operator'} asked for {f.worker}'s requests to move{f' to {f.to}' if f.to else ''}"


def _parenthesized(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _command_refused(f: o.CommandRefused) -> str:
    about = f" of {f.worker}" if f.worker else ""  # `allow` names no worker
    return f"{f.by or 'an operator'}'s {f.verb}{about} was refused: {f.why}"


def _shutdown_began(f: o.ShutdownBegan) -> str:
    if f.mode == "self_initiated":
        return f"{f.worker} is shutting itself down{f': {f.reason}' if f.reason else ''}"
    return f"{f.worker} began to shut down (grace period {span(f.grace_s)})"


def _device_faulted(f: o.DeviceFaulted) -> str:
    if f.fatal:
        costs = f"fatal: {f.worker} cannot continue"
    elif f.weight is None:
        costs = "a warning"
    elif f.weight:
        costs = f"{f.worker} may receive {f.weight:.0%} of its share of the traffic"
    else:
        costs = f"{f.worker} may receive no new requests"
    return f"{f.device} of {f.worker} reported {_fault(f)} ({costs})"


def _fault(f: o.DeviceFaulted | o.DeviceRecovered) -> str:
    """Format the fault class of a device as text, such as "Xid 48" or "throttle (thermal)"."""
    if f.fault_class.startswith("xid"):
        return f"Xid {f.code}"
    return f.fault_class + (f" ({f.code})" if f.code else "")


def _chaos(f: o.ChaosInjected) -> str:
    acts = {"heal": f"healed {f.worker}", "unhang": f"ended the hang of {f.worker}"}
    act = acts.get(f.fault, f"injected a fault into {f.worker}: {f.fault}")
    lasts = "" if f.duration_s is None else f", for {span(f.duration_s)}"
    return f"{f.by or 'a rehearsal'} {act}{f' ({f.detail})' if f.detail else ''}{lasts}"


def _probed(f: o.CanaryResult | o.GoldenDisputed) -> str:
    """Return what a canary probed: a worker such as "w0", or one of its ranks such as "DP rank 3 of w0"."""
    return f.worker if f.rank is None else f"DP rank {f.rank} of {f.worker}"


def _canary_failed(f: o.CanaryFailed) -> str:
    confirmed = ", confirmed" if f.confirmed else ""
    text = f"{_probed(f)} failed a canary: {f.reason}{confirmed}"
    if f.reason == "token_mismatch":
        return f"{text} ({_difference(f.expected, f.got)})"
    if f.reason == "logit_drift" and f.distance is not None:
        return f"{text} (logprobs off by {f.distance:.3g})"
    return f"{text} ({f.detail})" if f.detail else text


def _canary_passed(f: o.CanaryPassed) -> str:
    trial = {"trial": "its trial canary", "join": "one of its first canaries"}.get(f.check_type, "a canary")
    return f"{_probed(f)} passed {trial} in {f.latency_ms:.0f} ms"


def _request_failed(f: o.RequestFailed) -> str:
    return f"a request failed on {f.worker}: {f.reason} ({f.failures_in_a_row} in a row at {f.frontend})"


def _request_suspected(f: o.RequestSuspected) -> str:
    return f"{f.worker} failed ({f.reason}) before the first token of a request of {count(f.prompt_tokens, 'token')}"


def _request_poisonous(f: o.RequestPoisonous) -> str:
    form = f" with {f.guided}" if f.guided else ""
    return (
        f"a request of {count(f.prompt_tokens, 'token')}{form} failed alike on two workers, one of them {f.worker}: {f.reason}; "
        f"similar requests are rejected for {span(f.refused_s)}"
    )


def _migrated(f: o.RequestMigrated) -> str:
    kept = f"after {count(f.tokens, 'token')}, gap {span(f.gap_ms / 1000)}"
    exact = "" if f.exact else ", approximate"
    if f.method == "transfer":
        exact += f", with its KV cache: {count(f.blocks, 'block')} over {f.link}"
    elif f.refused:
        exact += f", recomputed: {f.refused}"
    same = (f.source, f.source_instance) == (f.target, f.target_instance)
    where = f"on {f.target} again" if same else f"from {f.source} to {f.target}"
    return f"{f.request} {'resumed' if same else 'migrated'} {where} ({f.cause}, {kept}{exact})"


def _exposed(f: o.RequestExposed) -> str:
    done = "finished" if f.finished else f"running, action {f.action}"
    source = f.worker if f.rank is None else f"DP rank {f.rank} of {f.worker}"
    return f"{f.request} holds tokens {f.first}–{f.last} from {source} ({done})"


def _unknown(f: o.ExposureUnknown) -> str:
    since, until = (t.strftime("%H:%M:%S") for t in (f.since, f.until))
    return f"{f.frontend} cannot determine which requests {f.worker} served from {since} to {until} ({f.why})"


def _health(f: d.HealthChanged) -> str:
    if f.before is f.after:
        return f"{f.worker} stays {f.after} with weight {f.weight:g} ({f.reason})"
    return f"{f.worker} went from {f.before} to {f.after}, weight {f.weight:g} ({f.reason})"


def _proposed(f: o.ScaleProposed) -> str:
    reasons = {
        "up": f"{f.needed} are needed soon ({f.bound or 'traffic'}, forecast by {f.method})",
        "down": f"{f.needed} are enough ({f.bound or 'traffic'}, forecast by {f.method})",
        "lost": "lost workers are replaced",
        "floor": "below the minimum",
        "operator": "set by an operator",
    }
    held = f"; {f.held}" if f.held else ""
    wants = "scales" if f.by else "would scale"
    return f"{f.planner} {wants} {f.model} from {f.before} to {count(f.after, 'worker')}: {reasons.get(f.why, f.why)}{held}"


def _busy_from(f: o.BusyThresholdsSet) -> str:
    thresholds = {
        "KV blocks": f.active_decode_blocks,
        "prompt tokens to prefill": f.active_prefill_tokens,
        "prompt tokens to prefill per token of a step": f.active_prefill_tokens_frac,
    }
    bounds = ", ".join(f"{what} above {value:g}" for what, value in thresholds.items() if value is not None)
    return f"{f.model}: workers count as busy with {bounds or 'the thresholds set before'} (reported by {f.frontend})"


def _level(f: d.DegradationChanged) -> str:
    return (
        f"{f.model} went from level {f.before} to {f.after}: capacity {f.capacity_rps:.3g} requests/s, "
        f"{f.ratio:.0%} of the objective ({_knobs(f.knobs)})"
    )


def _knobs(k: d.Knobs) -> str:
    parts = [f"batches × {k.batch_size:g}", f"latency × {k.latency:g}"]
    if k.shed_tier is not None:
        parts.append(f"sheds {k.shed_tier} and below")
    return ", ".join(parts if k.accept_new else [*parts, "accepts no new requests"])


def _drained(f: o.DrainFinished) -> str:
    ends = {"completed": f.completed, "migrated": f.migrated, "cancelled": f.cancelled, "failed": f.failed}
    outcomes = ", ".join(f"{number} {how}" for how, number in ends.items() if number)
    return f"{f.worker} has drained{outcomes and f': {outcomes}'}"


def _breaker_move(move: o.BreakerMove) -> str:
    moved = {"open": "opened", "half_open": "half-opened", "closed": "closed"}[move.position]
    return f"{move.worker} {moved}{f' ({move.reason})' if move.reason else ''}"


def _own_breakers(f: o.FrontendBreakersMoved) -> str:
    moves = ", ".join(map(_breaker_move, f.moves[:MOVES_SHOWN]))
    if more := len(f.moves[MOVES_SHOWN:]) + f.dropped:
        moves += f" and {more} more"
    return f"own breakers of {f.frontend} moved: {moves or 'none'}"


def _cap(f: d.WeightCapped) -> str:
    if f.weight is None:
        return f"the ejection budget releases {f.worker} ({f.reason})"
    return f"the ejection budget keeps {f.worker} in service at weight {f.weight:g} ({f.reason})"


SENTENCES: dict[type[Fact], str | Callable[[Any], str]] = {
    Skipped: "not an event, skipped by all readers: {f.why}",
    o.WorkerJoined: _joined,
    o.AdaptersChanged: lambda f: f"{f.worker} now has these adapters: {', '.join(f.adapters) or 'none'}",
    o.WorkerAwaited: lambda f: f"{f.worker} cannot join yet{f.model and f' with {f.model}'}: {f.reason}",
    o.WorkerLeft: _left,
    o.WorkerSilent: lambda f: (
        f"{f.worker} has been silent for {span(f.silent_s)} (observer {_name(f.observer)})"
    ),
    o.WorkerHeard: lambda f: f"{f.worker} sends heartbeats again (observer {_name(f.observer)})",
    o.WorkerLingered: lambda f: (
        f"{f.worker} is dead, but its process {f.pid}{f' on {f.host}' if f.host else ''} is still running"
    ),
    o.ObserverBlind: lambda f: (
        f"{_name(f.observer)} receives no heartbeats from {f.silent} of {f.known} workers and suspects its own connection"
    ),
    o.IntrusionRefused: lambda f: (
        f"the broker rejected {f.who}{f' {f.times} times' if f.times > 1 else ''}: tried to {f.tried}"
    ),
    o.DrainRequested: _drain_requested,
    o.ResumeRequested: lambda f: f"{f.by or 'an operator'} asked {f.worker} to resume",
    o.MoveRequested: _move_requested,
    o.RestartRequested: lambda f: f"{f.by or 'an operator'} asked {f.worker} to restart",
    o.CommandRefused: _command_refused,
    o.EventQuarantined: lambda f: f"{f.by or 'an operator'} quarantined event {f.event}: {f.why}",
    o.SnapshotKept: lambda f: (
        f"part {f.part} of {f.parts} of a snapshot of the fleet, settled at event {f.decided}"
    ),
    o.ShutdownBegan: _shutdown_began,
    o.DrainFinished: _drained,
    o.DeviceFaulted: _device_faulted,
    o.DeviceRecovered: lambda f: f"{f.device} of {f.worker} recovered from {_fault(f)}",
    o.EngineFaulted: lambda f: f"the engine of {f.worker} failed: {f.reason}{' (fatal)' if f.fatal else ''}",
    o.ChaosInjected: _chaos,
    o.CanaryPassed: _canary_passed,
    o.CanarySlow: lambda f: (
        f"{_probed(f)} passed a canary slowly: {f.latency_ms:.0f} ms, baseline {f.baseline_ms:.0f} ms"
    ),
    o.CanaryFailed: _canary_failed,
    o.GoldenProposed: lambda f: f"{f.worker} proposed an answer to {f.canary}: {_tokens(f.tokens)}",
    o.GoldenDisputed: lambda f: (
        f"{_probed(f)} contradicts the configured answer to {f.canary}, which no other worker has confirmed"
        if f.proposed_by == CONFIGURED
        else f"{_probed(f)} and {f.proposed_by} answer {f.canary} differently: one of them is wrong"
    ),
    o.GoldenRequested: lambda f: (
        f"{f.by or 'an operator'} asked to {f.act} the goldens of "
        f"{', '.join(f.canaries or (answer.canary for answer in f.answers))}{f.worker and f' with {f.worker}'}"
    ),
    o.TokensUnlikely: lambda f: (
        f"{f.worker} sampled unlikely tokens in {f.canary}: its sampler may be faulty"
        if f.found_by == "canary"
        else f"{f.worker} sampled {f.unlikely} unlikely tokens of {f.tokens} for users: its sampler may be faulty"
    ),
    o.RequestsServed: lambda f: (
        f"{f.worker} served {count(f.count, 'request')} from {f.frontend} ({f.tokens} tokens)"
    ),
    o.RequestFailed: _request_failed,
    o.RequestSuspected: _request_suspected,
    o.RequestPoisonous: _request_poisonous,
    o.WorkerSlow: "{f.worker} is slow at {f.frontend}: {f.latency_ms:.0f} ms, baseline {f.baseline_ms:.0f} ms",
    o.WorkerSlowCleared: "{f.worker} is no longer slow at {f.frontend}",
    o.RequestMigrated: _migrated,
    o.RequestPreempted: lambda f: (
        f"{f.request} ({f.tier}) was preempted on {f.worker} after {count(f.tokens, 'token')} by a more urgent request"
    ),
    o.RequestResumed: lambda f: (
        f"{f.request} resumed on {f.target} after {span(f.gap_ms / 1000)}{'' if f.exact else ', approximate'}"
    ),
    o.RequestAbandoned: lambda f: (
        f"{f.request} was lost on {f.worker} after {count(f.tokens, 'token')}: {f.reason}"
    ),
    o.RequestsRejected: lambda f: (
        f"{f.frontend} rejected {count(f.count, 'request')} for {f.model} ({f.tier}): {f.reason}"
    ),
    o.BusyThresholdsSet: _busy_from,
    o.TrafficReported: lambda f: (
        f"{f.frontend} received {count(f.requests, 'request')} for {f.model} in one minute ({f.rejected} rejected, {f.late} late)"
    ),
    o.CapacityReported: lambda f: (
        f"{f.healthy} of {count(f.provisioned, 'worker')} of {f.model} can serve {f.achievable_rps:.1f} requests/s"
    ),
    o.ScaleProposed: _proposed,
    o.ScaleSet: lambda f: (
        f"{f.by} set {f.model} to {count(f.workers, 'worker')}{_parenthesized(f.reason)}"
        if f.workers is not None
        else f"{f.by} released the number of {f.model} workers to the planner{_parenthesized(f.reason)}"
    ),
    o.ScaleApplied: lambda f: (
        f"{f.by} {'scaled' if f.ok else 'could not scale'} {f.model} to {count(f.after, 'worker')}: {f.says}"
    ),
    o.RequestExposed: _exposed,
    o.ExposureUnknown: _unknown,
    o.PanicBegan: "{f.frontend} ignores its own breakers for {f.model}: {f.routable_share:.0%} of its weight is routable",
    o.PanicEnded: "{f.frontend} applies its own breakers for {f.model} again",
    o.FrontendBreakersMoved: _own_breakers,
    d.HealthChanged: _health,
    d.BreakerOpened: lambda f: f"the breaker of {f.worker} opened for {span(f.wait_s)} ({f.reason})",
    d.BreakerHalfOpened: "the breaker of {f.worker} half-opened: one trial until {f.deadline:%H:%M:%S}",
    d.BreakerClosed: "the breaker of {f.worker} closed",
    d.DrainStarted: "{f.worker} drains until {f.deadline:%H:%M:%S} ({f.reason})",
    d.DrainEnded: "the drain of {f.worker} ended ({f.outcome})",
    d.WeightCapped: _cap,
    d.SpareActivated: "spare {f.worker} replaces {f.replaces} ({f.reason})",
    d.SpareReleased: "{f.worker} is a spare again: {f.returned} has returned to its place",
    d.WorkerForgotten: "{f.worker} has left permanently and was removed from the fleet",
    d.GoldenAgreed: lambda f: (
        f"{', '.join(f.by)} {'agrees' if len(f.by) == 1 else 'agree'} on the answer to {f.canary}: from now on it convicts"
    ),
    d.GoldenRetired: "the answer to {f.canary} was retired ({f.reason})",
    d.DegradationChanged: _level,
    d.IncidentOpened: lambda f: f"{f.incident} opened for {about(f.subject)}: {f.symptom}",
    d.IncidentClosed: lambda f: f"{f.incident} closed for {about(f.subject)}: {f.outcome}",
    d.PolicyAdopted: "the controller adopted its policy (deciders version {f.deciders_version})",
    d.Absorbed: "the controller had nothing to decide",
}
