"""What an event says, in words. Every kind has its sentence; a test sees to it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from controller.deciders.golden import CONFIGURED
from controller.terminal_text import safe
from events import decisions as d
from events import observations as o
from events.fact import Fact, Recorded, Skipped

TOKENS_SHOWN = 8
MOVES_SHOWN = 6
SPAN_S_MAX = 1e9  # thirty years: what is said to have lasted longer never ended


def line(event: Recorded, *, date: bool = False) -> str:
    """Return an event as one line: the stream's time, then what happened."""
    time = f"{event.at:%H:%M:%S.%f}"[:-3]
    return f"{f'{event.at:%Y-%m-%d} {time} UTC' if date else time} {sentence(event.fact)}"


def sentence(fact: Fact) -> str:
    """Return what a fact says, as one sentence without a full stop."""
    return safe(_said(fact, SENTENCES.get(type(fact))).replace("\n", " "))


def _said(fact: Fact, say: "str | Callable[[Any], str] | None") -> str:
    if say is None:
        return f"{fact.kind()}: {fact}"
    return say.format(f=fact) if isinstance(say, str) else say(fact)


def span(seconds: float) -> str:
    """Return a duration as people say it: 850 ms, 4.2 s, 12 min."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return str(timedelta(seconds=round(min(seconds, SPAN_S_MAX))))


def count(number: int, thing: str) -> str:
    """Return "1 token", "2 tokens"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def about(subject: str) -> str:
    """Return an incident's subject as one says it: worker w0."""
    return subject.replace(":", " ", 1)


def _name(source: str) -> str:
    """Return which process speaks, without its role and its life."""
    return source.split(":")[1] if ":" in source else source


def _tokens(tokens: tuple[int, ...]) -> str:
    shown = " ".join(map(str, tokens[:TOKENS_SHOWN]))
    return f"{shown} …" if len(tokens) > TOKENS_SHOWN else shown or "nothing"


def _difference(expected: tuple[int, ...], got: tuple[int, ...]) -> str:
    """Say where an answer went wrong: the first place that differs, and a little around it."""
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
        return f"{f.worker} was ended by signal {-f.exit if f.exit < 0 else f.exit - 128}"
    return f"{f.worker} left ({f.mode.replace('_', ' ')}{'' if f.exit is None else f', exit {f.exit}'})"


def _drain_requested(f: o.DrainRequested) -> str:
    within = "" if f.deadline_s is None else f" within {span(f.deadline_s)}"
    return f"{f.by or 'an operator'} asked {f.worker} to drain{within}"


def _move_requested(f: o.MoveRequested) -> str:
    return f"{f.by or 'an operator'} asked for {f.worker}'s requests to move{f' to {f.to}' if f.to else ''}"


def _for(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _command_refused(f: o.CommandRefused) -> str:
    about = f" of {f.worker}" if f.worker else ""  # `allow` is about no worker
    return f"{f.by or 'an operator'}'s {f.verb}{about} was refused: {f.why}"


def _began(f: o.ShutdownBegan) -> str:
    if f.mode == "self_initiated":
        return f"{f.worker} ends itself{f': {f.reason}' if f.reason else ''}"
    return f"{f.worker} began to stop ({span(f.grace_s)} of grace)"


def _device_faulted(f: o.DeviceFaulted) -> str:
    if f.fatal:
        costs = f"fatal: {f.worker} cannot go on"
    elif f.weight is None:
        costs = "a warning"
    elif f.weight:
        costs = f"{f.worker} may take {f.weight:.0%} of its share of the traffic"
    else:
        costs = f"{f.worker} may take nothing new"
    return f"{f.device} of {f.worker} reported {_fault(f)} ({costs})"


def _fault(f: o.DeviceFaulted | o.DeviceRecovered) -> str:
    """Return a device's fault as one says it: Xid 48, throttle (thermal)."""
    if f.fault_class.startswith("xid"):
        return f"Xid {f.code}"
    return f.fault_class + (f" ({f.code})" if f.code else "")


def _chaos(f: o.ChaosInjected) -> str:
    acts = {"heal": f"healed {f.worker}", "unhang": f"let {f.worker} go on"}
    act = acts.get(f.fault, f"broke {f.worker} on purpose: {f.fault}")
    lasts = "" if f.duration_s is None else f", for {span(f.duration_s)}"
    return f"{f.by or 'a rehearsal'} {act}{f' ({f.detail})' if f.detail else ''}{lasts}"


def _asked(f: o.CanaryResult | o.GoldenDisputed) -> str:
    """Return who was asked: w0, or DP rank 3 of w0."""
    return f.worker if f.rank is None else f"DP rank {f.rank} of {f.worker}"


def _canary_failed(f: o.CanaryFailed) -> str:
    confirmed = ", confirmed" if f.confirmed else ""
    text = f"{_asked(f)} failed a canary: {f.reason}{confirmed}"
    if f.reason == "token_mismatch":
        return f"{text} ({_difference(f.expected, f.got)})"
    if f.reason == "logit_drift" and f.distance is not None:
        return f"{text} (logprobs off by {f.distance:.3g})"
    return f"{text} ({f.detail})" if f.detail else text


def _canary_passed(f: o.CanaryPassed) -> str:
    trial = {"trial": "its trial canary", "join": "one of its first canaries"}.get(f.check_type, "a canary")
    return f"{_asked(f)} passed {trial} in {f.latency_ms:.0f} ms"


def _request_failed(f: o.RequestFailed) -> str:
    return f"a request failed on {f.worker}: {f.reason} ({f.failures_in_a_row} in a row at {f.frontend})"


def _request_suspected(f: o.RequestSuspected) -> str:
    return f"{f.worker} fell ({f.reason}) before it had answered anything of a request of {count(f.prompt_tokens, 'token')}"


def _request_poisonous(f: o.RequestPoisonous) -> str:
    form = f" with {f.guided}" if f.guided else ""
    return (
        f"a request of {count(f.prompt_tokens, 'token')}{form} fails everywhere, on {f.worker} too: {f.reason}; "
        f"its like is refused for {span(f.refused_s)}"
    )


def _migrated(f: o.RequestMigrated) -> str:
    kept = f"after {count(f.tokens, 'token')}, gap {span(f.gap_ms / 1000)}"
    exact = "" if f.exact else ", approximate"
    if f.method == "transfer":
        exact += f", with its KV cache: {count(f.blocks, 'block')} over {f.link}"
    elif f.refused:
        exact += f", computed again: {f.refused}"
    same = (f.source, f.source_instance) == (f.target, f.target_instance)
    where = f"on {f.target} again" if same else f"from {f.source} to {f.target}"
    return f"{f.request} went on {where} ({f.cause}, {kept}{exact})"


def _exposed(f: o.RequestExposed) -> str:
    done = "finished" if f.finished else f"running, action {f.action}"
    whom = f.worker if f.rank is None else f"DP rank {f.rank} of {f.worker}"
    return f"{f.request} holds tokens {f.first}–{f.last} from {whom} ({done})"


def _unknown(f: o.ExposureUnknown) -> str:
    since, until = (t.strftime("%H:%M:%S") for t in (f.since, f.until))
    return f"{f.frontend} cannot say which requests {f.worker} served from {since} to {until} ({f.why})"


def _health(f: d.HealthChanged) -> str:
    if f.before is f.after:
        return f"{f.worker} stays {f.after} with weight {f.weight:g} ({f.reason})"
    return f"{f.worker} went from {f.before} to {f.after}, weight {f.weight:g} ({f.reason})"


def _proposed(f: o.ScaleProposed) -> str:
    reasons = {
        "up": f"{f.needed} are needed soon ({f.bound or 'traffic'}, as {f.method} foresees)",
        "down": f"{f.needed} are enough ({f.bound or 'traffic'}, as {f.method} foresees)",
        "lost": "lost ones are replaced",
        "floor": "fewer than there must be",
        "operator": "an operator wants it",
    }
    held = f"; {f.held}" if f.held else ""
    wants = "scales" if f.by else "would scale"
    return f"{f.planner} {wants} {f.model} from {f.before} to {count(f.after, 'worker')}: {reasons.get(f.why, f.why)}{held}"


def _busy_from(f: o.BusyThresholdsSet) -> str:
    said = {
        "KV blocks": f.active_decode_blocks,
        "prompt tokens to be read": f.active_prefill_tokens,
        "of them, by the tokens of a step": f.active_prefill_tokens_frac,
    }
    bounds = ", ".join(f"{what} above {value:g}" for what, value in said.items() if value is not None)
    return f"{f.model}: workers are busy with {bounds or 'what was set before'} (said by {f.frontend})"


def _level(f: d.DegradationChanged) -> str:
    return (
        f"{f.model} went from level {f.before} to {f.after}: capacity {f.capacity_rps:.3g} requests/s, "
        f"{f.ratio:.0%} of what is promised ({_knobs(f.knobs)})"
    )


def _knobs(k: d.Knobs) -> str:
    said = [f"batches × {k.batch_size:g}", f"latency × {k.latency:g}"]
    if k.shed_tier is not None:
        said.append(f"sheds {k.shed_tier} and below")
    return ", ".join(said if k.accept_new else [*said, "accepts nothing new"])


def _drained(f: o.DrainFinished) -> str:
    ends = {"completed": f.completed, "migrated": f.migrated, "cancelled": f.cancelled, "failed": f.failed}
    said = ", ".join(f"{number} {how}" for how, number in ends.items() if number)
    return f"{f.worker} is empty{said and f': {said}'}"


def _breaker_move(move: o.BreakerMove) -> str:
    moved = {"open": "opened", "half_open": "half-opened", "closed": "closed"}[move.position]
    return f"{move.worker} {moved}{f' ({move.reason})' if move.reason else ''}"


def _own_breakers(f: o.FrontendBreakersMoved) -> str:
    said = ", ".join(map(_breaker_move, f.moves[:MOVES_SHOWN]))
    if more := len(f.moves[MOVES_SHOWN:]) + f.dropped:
        said += f" and {more} more"
    return f"own breakers of {f.frontend} moved: {said or 'none'}"


def _cap(f: d.WeightCapped) -> str:
    if f.weight is None:
        return f"the ejection budget lets go of {f.worker} ({f.reason})"
    return f"the ejection budget keeps {f.worker} in service at weight {f.weight:g} ({f.reason})"


SENTENCES: dict[type[Fact], str | Callable[[Any], str]] = {
    Skipped: "no event, everybody steps over it: {f.why}",
    o.WorkerJoined: _joined,
    o.WorkerAwaited: lambda f: f"{f.worker} is awaited{f.model and f' with {f.model}'}: {f.reason}",
    o.WorkerLeft: _left,
    o.WorkerSilent: lambda f: f"{f.worker} has been silent for {span(f.silent_s)}, says {_name(f.observer)}",
    o.WorkerHeard: lambda f: f"{f.worker} was heard again, says {_name(f.observer)}",
    o.WorkerLingered: lambda f: (
        f"{f.worker} is dead, but its process {f.pid}{f' on {f.host}' if f.host else ''} lives: nobody ends it"
    ),
    o.ObserverBlind: lambda f: (
        f"{_name(f.observer)} hears nothing from {f.silent} of {f.known} workers and doubts itself"
    ),
    o.IntrusionRefused: lambda f: (
        f"{f.who} tried to {f.tried} and was refused by the broker{f', {f.times} times' if f.times > 1 else ''}"
    ),
    o.DrainRequested: _drain_requested,
    o.ResumeRequested: lambda f: f"{f.by or 'an operator'} asked {f.worker} to resume",
    o.MoveRequested: _move_requested,
    o.RestartRequested: lambda f: f"{f.by or 'an operator'} asked {f.worker} to restart",
    o.CommandRefused: _command_refused,
    o.EventQuarantined: lambda f: (
        f"{f.by or 'an operator'} decided that event {f.event} does not count: {f.why}"
    ),
    o.SnapshotKept: lambda f: (
        f"part {f.part} of {f.parts} of the fleet as it was settled at {f.decided}, for who begins there"
    ),
    o.ShutdownBegan: _began,
    o.DrainFinished: _drained,
    o.DeviceFaulted: _device_faulted,
    o.DeviceRecovered: lambda f: f"{f.device} of {f.worker} recovered from {_fault(f)}",
    o.EngineFaulted: lambda f: f"the engine of {f.worker} broke: {f.reason}{' (fatal)' if f.fatal else ''}",
    o.ChaosInjected: _chaos,
    o.CanaryPassed: _canary_passed,
    o.CanarySlow: lambda f: (
        f"{_asked(f)} passed a canary slowly: {f.latency_ms:.0f} ms against {f.baseline_ms:.0f} ms"
    ),
    o.CanaryFailed: _canary_failed,
    o.GoldenProposed: lambda f: f"{f.worker} gave an answer to {f.canary}: {_tokens(f.tokens)}",
    o.GoldenDisputed: lambda f: (
        f"{_asked(f)} contradicts the configured answer to {f.canary}, which nobody has confirmed"
        if f.proposed_by == CONFIGURED
        else f"{_asked(f)} and {f.proposed_by} answer {f.canary} differently: one of them is wrong"
    ),
    o.GoldenRequested: lambda f: (
        f"{f.by or 'an operator'} asked: {f.act} the goldens of "
        f"{', '.join(f.canaries or (answer.canary for answer in f.answers))}{f.worker and f' with {f.worker}'}"
    ),
    o.TokensUnlikely: lambda f: (
        f"{f.worker} drew unlikely tokens in {f.canary}: its sampler may be broken"
        if f.found_by == "canary"
        else f"{f.worker} drew {f.unlikely} unlikely of {f.tokens} tokens for users: its sampler may be broken"
    ),
    o.RequestsServed: lambda f: (
        f"{f.worker} served {count(f.count, 'request')} of {f.frontend} ({f.tokens} tokens)"
    ),
    o.RequestFailed: _request_failed,
    o.RequestSuspected: _request_suspected,
    o.RequestPoisonous: _request_poisonous,
    o.WorkerSlow: "{f.worker} is slow at {f.frontend}: {f.latency_ms:.0f} ms against {f.baseline_ms:.0f} ms",
    o.WorkerSlowCleared: "{f.worker} keeps up again at {f.frontend}",
    o.RequestMigrated: _migrated,
    o.RequestPreempted: lambda f: (
        f"{f.request} ({f.tier}) left {f.worker} after {count(f.tokens, 'token')} for a more urgent one, and goes on later"
    ),
    o.RequestResumed: lambda f: (
        f"{f.request} goes on at {f.target} after {span(f.gap_ms / 1000)}{'' if f.exact else ', approximate'}"
    ),
    o.RequestAbandoned: lambda f: (
        f"{f.request} was lost on {f.worker} after {count(f.tokens, 'token')}: {f.reason}"
    ),
    o.RequestsRejected: lambda f: (
        f"{f.frontend} rejected {count(f.count, 'request')} of {f.model} ({f.tier}): {f.reason}"
    ),
    o.BusyThresholdsSet: _busy_from,
    o.TrafficReported: lambda f: (
        f"{count(f.requests, 'request')} of {f.model} came to {f.frontend} within a minute ({f.rejected} rejected, {f.late} late)"
    ),
    o.CapacityReported: lambda f: (
        f"{f.healthy} of {count(f.provisioned, 'worker')} of {f.model} carry {f.achievable_rps:.1f} requests a second"
    ),
    o.ScaleProposed: _proposed,
    o.ScaleSet: lambda f: (
        f"{f.by} set {f.model} to {count(f.workers, 'worker')}{_for(f.reason)}"
        if f.workers is not None
        else f"{f.by} left the number of {f.model}'s workers to the planner again{_for(f.reason)}"
    ),
    o.ScaleApplied: lambda f: (
        f"{f.by} {'has' if f.ok else 'could not make it'} {count(f.after, 'worker')} of {f.model}: {f.says}"
    ),
    o.RequestExposed: _exposed,
    o.ExposureUnknown: _unknown,
    o.PanicBegan: "{f.frontend} ignores its own breakers for {f.model}: {f.routable_share:.0%} of its weight is routable",
    o.PanicEnded: "{f.frontend} obeys its own breakers for {f.model} again",
    o.FrontendBreakersMoved: _own_breakers,
    d.HealthChanged: _health,
    d.BreakerOpened: lambda f: f"the breaker of {f.worker} opened for {span(f.wait_s)} ({f.reason})",
    d.BreakerHalfOpened: "the breaker of {f.worker} half-opened: one trial until {f.deadline:%H:%M:%S}",
    d.BreakerClosed: "the breaker of {f.worker} closed",
    d.DrainStarted: "{f.worker} drains until {f.deadline:%H:%M:%S} ({f.reason})",
    d.DrainEnded: "the drain of {f.worker} ended ({f.outcome})",
    d.WeightCapped: _cap,
    d.SpareActivated: "{f.worker}, a spare, serves from now on in the place of {f.replaces} ({f.reason})",
    d.SpareReleased: "{f.worker} is a spare again: {f.returned} has its place back",
    d.WorkerForgotten: "{f.worker} has left for good, and is forgotten",
    d.GoldenAgreed: lambda f: (
        f"the answer to {f.canary} is agreed by {', '.join(f.by)}: from now on it convicts"
    ),
    d.GoldenRetired: "the answer to {f.canary} counts no longer ({f.reason})",
    d.DegradationChanged: _level,
    d.IncidentOpened: lambda f: f"{f.incident} opened for {about(f.subject)}: {f.symptom}",
    d.IncidentClosed: lambda f: f"{f.incident} closed for {about(f.subject)}: {f.outcome}",
    d.PolicyAdopted: "the controller adopted its policy (deciders version {f.deciders_version})",
    d.Absorbed: "the controller had nothing to decide",
}
