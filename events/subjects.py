"""Subjects on the broker: of each fact on the stream, and of messages that are not stored."""

from functools import lru_cache

from events.fact import Decision, Fact, Observation

STREAM = "FLEET"
BUCKET = "HOLDFAST"  # a key-value bucket: the lease
OBSERVED = "fleet.observed"
DECIDED = "fleet.decided"
DECIDED_ALL = f"{DECIDED}.>"
STREAM_SUBJECTS = (f"{OBSERVED}.>", DECIDED_ALL)

# Core NATS, not stored: heartbeats of workers, link reports of frontends, the operator's control subjects.
BEATS = "live.beat.*"
LINKS = "live.links.*"
KNOWN = "live.known"
KNOWN_ALL = "live.known.*.*"
CONTROL = "control"
KV_EVENTS = "kv.events.*"
KV_SLOTS = "kv.slots"
PLANE = "plane"
PLANE_SCHEME = "nats"
ANSWER = "answer"  # of a worker: it may answer below its own name only
DEAD_STREAM = "DEAD_LETTERS"  # a bounded stream of its own: events that could not be delivered to a webhook
DEAD = "dead.webhook"
SAY = "say"  # facts of workers on their way to the journal: a controller checks each first
SAY_ALL = f"{SAY}.>"
ANONYMOUS = "any"  # a requester without a broker account


def beat(worker: str) -> str:
    """Return the subject of a worker's heartbeat."""
    return f"live.beat.{token(worker)}"


def live(worker: str) -> str:
    """Return the wildcard for all subjects that address one worker, and its heartbeat."""
    return f"live.*.{token(worker)}"


def links(frontend: str) -> str:
    """Return the subject on which a frontend reports the workers that it is connected to."""
    return f"live.links.{token(frontend)}"


def known(role: str, name: str) -> str:
    """Return the subject on which a process announces the kinds and the deciders version that it knows."""
    return f"{KNOWN}.{token(role)}.{token(name)}"


def kinds(worker: str) -> str:
    """Return the subject on which a worker is notified which kinds are in force: JSON {kinds}."""
    return f"live.kinds.{token(worker)}"


def kv_events(worker: str) -> str:
    """Return the subject on which a worker publishes which KV blocks it has stored and removed."""
    return f"kv.events.{token(worker)}"


def kv_ask(worker: str, instance: str) -> str:
    """Return the subject of requests to an instance for missed KV events, and for all of its blocks."""
    return f"kv.ask.{token(worker)}.{token(instance)}"


def plane(worker: str, instance: str) -> str:
    """Return the subject below which an instance accepts frontends, if the request plane uses the broker."""
    return f"{PLANE}.{token(worker)}.{token(instance)}"


def plane_url(worker: str, instance: str) -> str:
    """Return the address that such an instance registers."""
    return f"{PLANE_SCHEME}:{plane(worker, instance)}"


def plane_of(url: str) -> str | None:
    """Return the subject in an address of `plane_url`; None for any other address."""
    subject = url.removeprefix(f"{PLANE_SCHEME}:")
    parts = subject.split(".")
    good = len(parts) == 3 and parts[0] == PLANE and all(part == token(part) for part in parts)
    return subject if good and subject != url else None


def addressed_worker(subject: str) -> str | None:
    """Return the worker (as a subject token) that a subject addresses; None if it addresses none."""
    match subject.split("."):
        case ["live", verb, worker] if verb not in ("beat", "links"):
            return worker
        case ["plane", worker, _, *_] | ["kv", "ask", worker, _]:
            return worker
    return None


def answer(worker: str, asker: str, about: object) -> str:
    """Return the subject of a worker's reply to a requester (`USER.CONNECTION`, both tokens)."""
    return f"{ANSWER}.{worker}.{asker}.{about}"


def answers(asker: str) -> str:
    """Return the wildcard for all replies of workers to one requester."""
    return f"{ANSWER}.*.{asker}.*"


def dead(webhook: str) -> str:
    """Return the subject of a webhook's dead letters."""
    return f"{DEAD}.{token(webhook)}"


def retire(worker: str) -> str:
    """Return the subject on which a worker is notified that the fleet has declared its instance dead: JSON {instance}."""
    return f"live.retire.{token(worker)}"


def stop(worker: str) -> str:
    """Return the subject on which a worker is requested to shut down gracefully: JSON {instance}."""
    return f"live.stop.{token(worker)}"


def chaos(worker: str) -> str:
    """Return the subject on which a worker receives chaos faults."""
    return f"live.chaos.{token(worker)}"


def drain(worker: str) -> str:
    """Return the subject on which a worker is requested to drain: JSON {instance, deadline_s}."""
    return f"live.drain.{token(worker)}"


def batch(worker: str) -> str:
    """Return the subject on which a worker is notified how much of its batch it may fill: JSON {instance, share}."""
    return f"live.batch.{token(worker)}"


def distrust(worker: str) -> str:
    """Return the subject on which a worker is notified that it is convicted of wrong answers: JSON {instance, reason}. An
    empty reason withdraws the conviction."""
    return f"live.distrust.{token(worker)}"


def resume(worker: str) -> str:
    """Return the subject on which a drained worker is requested to serve again: JSON {instance}."""
    return f"live.resume.{token(worker)}"


def said(user: str, subject: str) -> str:
    """Return the subject on which a worker's process, by its broker account, publishes a fact to the intake."""
    return f"{SAY}.{user}.{subject.removeprefix(f'{OBSERVED}.worker.')}"


def journal_end(user: str) -> str:
    """Return the subject on which a worker's process requests the journal's last sequence and time from the intake."""
    return f"{SAY}.{user}"


def subject(fact: Fact) -> str:
    """Return the stream subject of a fact.

    Decisions have one subject per kind, because the fence's cost grows with the number of subjects that it covers.
    Observations are on `fleet.observed.<entity>.<id>.<kind>`.
    """
    if isinstance(fact, Decision):
        return f"{DECIDED}.{fact.kind()}"
    assert isinstance(fact, Observation)
    name = "all" if fact.entity == "fleet" else str(getattr(fact, fact.entity))
    return f"{OBSERVED}.{fact.entity}.{token(name)}.{fact.kind()}"


def of_all(kind: type[Observation]) -> str:
    """Return the subject of a kind of fact about the whole fleet."""
    assert kind.entity == "fleet"
    return f"{OBSERVED}.fleet.all.{kind.kind()}"


@lru_cache(4096)
def token(name: str) -> str:
    """Return `name` as one subject token. Dots, wildcards and white space, which have a meaning in NATS, become `_`."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name) or "_"
