"""Names on the wire: where each fact lives on the stream, and the subjects of what is not a fact of record."""

from functools import lru_cache

from events.fact import Decision, Fact, Observation

STREAM = "FLEET"
BUCKET = "HOLDFAST"  # a key-value bucket: the lease
OBSERVED = "fleet.observed"
DECIDED = "fleet.decided"
DECIDED_ALL = f"{DECIDED}.>"
STREAM_SUBJECTS = (f"{OBSERVED}.>", DECIDED_ALL)

# Core NATS, not kept: heartbeats of workers, link reports of frontends, the operator's control subjects.
BEATS = "live.beat.*"
LINKS = "live.links.*"
KNOWN = "live.known"
KNOWN_ALL = "live.known.*.*"
CONTROL = "control"
KV_EVENTS = "kv.events.*"
KV_SLOTS = "kv.slots"
PLANE = "plane"
PLANE_SCHEME = "nats"
ANSWER = "answer"  # of a worker: it may answer below its own name, and nobody in another's
DEAD_STREAM = "DEAD_LETTERS"  # a stream of its own, bounded: what a webhook has not taken
DEAD = "dead.webhook"
SAY = "say"  # facts of workers on their way to the journal: a controller checks each first
SAY_ALL = f"{SAY}.>"
ANYBODY = "any"  # an asker whom the broker does not know by name


def beat(worker: str) -> str:
    """Return the subject of a worker's heartbeat."""
    return f"live.beat.{token(worker)}"


def live(worker: str) -> str:
    """Return what covers all subjects on which one worker is spoken to, and its heartbeat."""
    return f"live.*.{token(worker)}"


def links(frontend: str) -> str:
    """Return the subject on which a frontend says which workers it is connected to."""
    return f"live.links.{token(frontend)}"


def known(role: str, name: str) -> str:
    """Return the subject on which a process announces which kinds and which version of the deciders it knows."""
    return f"{KNOWN}.{token(role)}.{token(name)}"


def kinds(worker: str) -> str:
    """Return the subject on which a worker hears which kinds are in force: JSON {kinds}."""
    return f"live.kinds.{token(worker)}"


def kv_events(worker: str) -> str:
    """Return the subject on which a worker says which KV blocks it has stored and removed."""
    return f"kv.events.{token(worker)}"


def kv_ask(worker: str, instance: str) -> str:
    """Return the subject on which an instance is asked for KV events that were missed, and for all of its blocks."""
    return f"kv.ask.{token(worker)}.{token(instance)}"


def plane(worker: str, instance: str) -> str:
    """Return the subject below which an instance lets frontends in, where the request plane goes through the broker."""
    return f"{PLANE}.{token(worker)}.{token(instance)}"


def plane_url(worker: str, instance: str) -> str:
    """Return the address that such an instance registers."""
    return f"{PLANE_SCHEME}:{plane(worker, instance)}"


def plane_of(url: str) -> str | None:
    """Return the subject that an address names; None if it is no such address."""
    subject = url.removeprefix(f"{PLANE_SCHEME}:")
    parts = subject.split(".")
    good = len(parts) == 3 and parts[0] == PLANE and all(part == token(part) for part in parts)
    return subject if good and subject != url else None


def asked(subject: str) -> str | None:
    """Return the worker, as a token, that is spoken to on a subject; None: it is no worker's."""
    match subject.split("."):
        case ["live", verb, worker] if verb not in ("beat", "links"):
            return worker
        case ["plane", worker, _, *_] | ["kv", "ask", worker, _]:
            return worker
    return None


def answer(worker: str, asker: str, about: object) -> str:
    """Return the subject on which a worker answers an asker (`USER.CONNECTION`, both tokens)."""
    return f"{ANSWER}.{worker}.{asker}.{about}"


def answers(asker: str) -> str:
    """Return what covers everything that workers answer to one asker."""
    return f"{ANSWER}.*.{asker}.*"


def dead(webhook: str) -> str:
    """Return the subject on which what a webhook has not taken is kept."""
    return f"{DEAD}.{token(webhook)}"


def retire(worker: str) -> str:
    """Return the subject on which a worker hears that the fleet holds its instance for dead: JSON {instance}."""
    return f"live.retire.{token(worker)}"


def stop(worker: str) -> str:
    """Return the subject on which a worker is asked to shut down in good order: JSON {instance}."""
    return f"live.stop.{token(worker)}"


def chaos(worker: str) -> str:
    """Return the subject on which a worker listens for rehearsed faults."""
    return f"live.chaos.{token(worker)}"


def drain(worker: str) -> str:
    """Return the subject on which a worker is asked to drain: JSON {instance, deadline_s}."""
    return f"live.drain.{token(worker)}"


def batch(worker: str) -> str:
    """Return the subject on which a worker hears how much of its batch it may fill: JSON {instance, share}."""
    return f"live.batch.{token(worker)}"


def distrust(worker: str) -> str:
    """Return the subject on which a worker hears that it is convicted of wrong answers: JSON {instance, reason}; an
    empty reason takes it back."""
    return f"live.distrust.{token(worker)}"


def resume(worker: str) -> str:
    """Return the subject on which a drained worker is asked to serve again: JSON {instance}."""
    return f"live.resume.{token(worker)}"


def said(user: str, subject: str) -> str:
    """Return the subject on which a worker's process, by its broker account, publishes a fact for the intake."""
    return f"{SAY}.{user}.{subject.removeprefix(f'{OBSERVED}.worker.')}"


def journal_end(user: str) -> str:
    """Return the subject on which a worker's process asks the intake where the journal ends, and its time."""
    return f"{SAY}.{user}"


def subject(fact: Fact) -> str:
    """Return the stream subject of a fact.

    Decisions live on one subject per kind, because the fence's cost grows with the subjects that it covers;
    observations on `fleet.observed.<entity>.<id>.<kind>`.
    """
    if isinstance(fact, Decision):
        return f"{DECIDED}.{fact.kind()}"
    assert isinstance(fact, Observation)
    name = "all" if fact.entity == "fleet" else str(getattr(fact, fact.entity))
    return f"{OBSERVED}.{fact.entity}.{token(name)}.{fact.kind()}"


def of_all(kind: type[Observation]) -> str:
    """Return the subject of a kind of fact that is said of the whole fleet."""
    assert kind.entity == "fleet"
    return f"{OBSERVED}.fleet.all.{kind.kind()}"


@lru_cache(4096)
def token(name: str) -> str:
    """Return `name` as one subject token: NATS gives dots, wildcards and white space a meaning."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name) or "_"
