"""Defines the subjects on the broker, of stored facts and of messages that are not stored."""

from functools import lru_cache

from events.fact import Decision, Fact, Observation

STREAM = "FLEET"
BUCKET = "HOLDFAST"  # name of the key-value bucket that holds the lease
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
ANSWER = "answer"  # prefix of workers' replies; a worker may publish only below ANSWER and its own name
# name of a separate bounded stream of events that could not be delivered to a webhook
DEAD_STREAM = "DEAD_LETTERS"
DEAD = "dead.webhook"
SAY = "say"  # prefix of facts that workers send to a controller, which checks and publishes them
SAY_ALL = f"{SAY}.>"
ANONYMOUS = "any"  # stands for a requester without a broker account


def beat(worker: str) -> str:
    """Return the subject on which a worker sends its heartbeats."""
    return f"live.beat.{token(worker)}"


def live(worker: str) -> str:
    """Return the wildcard for all `live.*` subjects that address one worker, and for the worker's own heartbeat."""
    return f"live.*.{token(worker)}"


def links(frontend: str) -> str:
    """Return the subject on which a frontend reports to which workers it is connected."""
    return f"live.links.{token(frontend)}"


def known(role: str, name: str) -> str:
    """Return the subject on which a process announces the kinds and the deciders version that it knows."""
    return f"{KNOWN}.{token(role)}.{token(name)}"


def kinds(worker: str) -> str:
    """Return the subject on which a worker is told which kinds are in force. The body is JSON {kinds}."""
    return f"live.kinds.{token(worker)}"


def kv_events(worker: str) -> str:
    """Return the subject on which a worker publishes which KV blocks it has stored and removed."""
    return f"kv.events.{token(worker)}"


def kv_ask(worker: str, instance: str) -> str:
    """Return the subject of requests to a worker instance for missed KV events, or for a dump of all its blocks."""
    return f"kv.ask.{token(worker)}.{token(instance)}"


def plane(worker: str, instance: str) -> str:
    """Return the subject below which a worker instance accepts channels of frontends, if the request plane uses the broker."""
    return f"{PLANE}.{token(worker)}.{token(instance)}"


def plane_url(worker: str, instance: str) -> str:
    """Return the URL that a worker instance registers if the request plane uses the broker."""
    return f"{PLANE_SCHEME}:{plane(worker, instance)}"


def plane_of(url: str) -> str | None:
    """Return the subject in a URL that `plane_url` has built. Return None for any other URL."""
    subject = url.removeprefix(f"{PLANE_SCHEME}:")
    parts = subject.split(".")
    good = len(parts) == 3 and parts[0] == PLANE and all(part == token(part) for part in parts)
    return subject if good and subject != url else None


def addressed_worker(subject: str) -> str | None:
    """Return the worker (as a subject token) that a subject addresses. Return None if the subject addresses no worker."""
    match subject.split("."):
        case ["live", verb, worker] if verb not in ("beat", "links"):
            return worker
        case ["plane", worker, _, *_] | ["kv", "ask", worker, _]:
            return worker
    return None


def answer(worker: str, asker: str, about: object) -> str:
    """Return the subject of a worker's reply. `asker` identifies the requester (`USER.CONNECTION`, two tokens), `about` the
    request."""
    return f"{ANSWER}.{worker}.{asker}.{about}"


def answers(asker: str) -> str:
    """Return the wildcard for all replies of workers to one requester (`USER.CONNECTION`)."""
    return f"{ANSWER}.*.{asker}.*"


def dead(webhook: str) -> str:
    """Return the subject of the dead letters of a webhook."""
    return f"{DEAD}.{token(webhook)}"


def retire(worker: str) -> str:
    """Return the subject on which a worker is told that the fleet has declared its instance dead. The body is JSON
    {instance}."""
    return f"live.retire.{token(worker)}"


def stop(worker: str) -> str:
    """Return the subject on which a worker is told to shut down gracefully. The body is JSON {instance}."""
    return f"live.stop.{token(worker)}"


def chaos(worker: str) -> str:
    """Return the subject on which a worker receives faults of `holdfast chaos`."""
    return f"live.chaos.{token(worker)}"


def drain(worker: str) -> str:
    """Return the subject on which a worker is told to drain. The body is JSON {instance, deadline_s}."""
    return f"live.drain.{token(worker)}"


def batch(worker: str) -> str:
    """Return the subject on which a worker is told which share of its batch it may fill. The body is JSON {instance, share}."""
    return f"live.batch.{token(worker)}"


def distrust(worker: str) -> str:
    """Return the subject on which a worker is told that it is convicted of wrong answers. The body is JSON {instance, reason}.

    An empty reason withdraws the conviction.
    """
    return f"live.distrust.{token(worker)}"


def resume(worker: str) -> str:
    """Return the subject on which a drained worker is told to serve again. The body is JSON {instance}."""
    return f"live.resume.{token(worker)}"


def said(user: str, subject: str) -> str:
    """Return the subject on which a worker process with the account `user` publishes a fact to a controller's fact intake.

    `subject` is the fact's subject on the stream.
    """
    return f"{SAY}.{user}.{subject.removeprefix(f'{OBSERVED}.worker.')}"


def journal_end(user: str) -> str:
    """Return the subject on which a worker process requests the journal's last sequence and time from a controller's fact
    intake."""
    return f"{SAY}.{user}"


def subject(fact: Fact) -> str:
    """Return the subject of a fact on the stream.

    Decisions have one subject per kind, because the fence's cost grows with the number of subjects that it covers. Observations
    are on `fleet.observed.<entity>.<id>.<kind>`.
    """
    if isinstance(fact, Decision):
        return f"{DECIDED}.{fact.kind()}"
    assert isinstance(fact, Observation)
    name = "all" if fact.entity == "fleet" else str(getattr(fact, fact.entity))
    return f"{OBSERVED}.{fact.entity}.{token(name)}.{fact.kind()}"


def of_all(kind: type[Observation]) -> str:
    """Return the subject of a kind of observation about the whole fleet."""
    assert kind.entity == "fleet"
    return f"{OBSERVED}.fleet.all.{kind.kind()}"


@lru_cache(4096)
def token(name: str) -> str:
    """Return `name` as one subject token. Dots, wildcards and white space, which have a meaning in NATS, become `_`."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name) or "_"
