"""Defines the subjects on the broker, of stored facts and of messages that are not stored."""

from functools import lru_cache
from typing import Literal, TypeAlias, get_args

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
RESPONSES = "responses"  # prefix of requests among frontends for stored responses
ANSWER = "answer"  # prefix of workers' replies; a worker may publish only below ANSWER and its own name
# name of a separate bounded stream of events that could not be delivered to a webhook
DEAD_STREAM = "DEAD_LETTERS"
DEAD = "dead.webhook"
SAY = "say"  # prefix of facts that workers send to a controller, which checks and publishes them
SAY_ALL = f"{SAY}.>"
Verb: TypeAlias = Literal["drain", "resume", "retire", "distrust", "batch", "stop", "chaos", "kinds"]
VERBS: tuple[Verb, ...] = get_args(Verb)  # of the controllers' requests to a worker
ANONYMOUS = "any"  # stands for a requester without a broker account


def beat(worker: str) -> str:
    """Return the subject on which a worker sends its heartbeats."""
    return f"live.beat.{token(worker)}"


def live(worker: str) -> str:
    """Return the wildcard for a worker's `live.*` subjects: those of messages to it, and that of its heartbeats."""
    return f"live.*.{token(worker)}"


def links(frontend: str) -> str:
    """Return the subject on which a frontend reports the workers to which it is connected."""
    return f"live.links.{token(frontend)}"


def known(role: str, name: str) -> str:
    """Return the subject on which a process announces the fact kinds and the version of the decision code (deciders) that it
    knows."""
    return f"{KNOWN}.{token(role)}.{token(name)}"


def command(verb: Verb, worker: str) -> str:
    """Return the subject on which a worker receives a controller's command.

    The body of a command is a JSON object. It contains the instance that the command addresses, and the fields that this list
    names after a colon:

        drain       stop accepting requests: deadline_s
        resume      serve again after a drain
        retire      end, because the fleet has declared this instance dead
        stop        shut down gracefully
        distrust    the worker is convicted of wrong answers: reason; an empty reason withdraws the conviction
        batch       limit the running requests to a fraction of the engine's largest batch: share (above 0, at most 1)
        chaos       a fault of `holdfast chaos`
        kinds       the kinds in force: kinds; sent to processes of any role, without an instance
    """
    return f"live.{verb}.{token(worker)}"


def kv_events(worker: str) -> str:
    """Return the subject on which a worker reports the KV blocks that it has stored and removed."""
    return f"kv.events.{token(worker)}"


def kv_ask(worker: str, instance: str) -> str:
    """Return the subject of requests to a worker instance for missed KV events, or for a dump of all its blocks."""
    return f"kv.ask.{token(worker)}.{token(instance)}"


def plane(worker: str, instance: str) -> str:
    """Return the prefix of the subjects on which a worker instance accepts channels of frontends. Used if the request plane
    uses the broker."""
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


def responses(tag: str) -> str:
    """Return the subject of requests for the stored responses of one frontend. `tag` stands for the frontend's name."""
    return f"{RESPONSES}.{token(tag)}"


def addressed_worker(subject: str) -> str | None:
    """Return the worker (as a subject token) that a subject addresses. Return None if the subject addresses no worker."""
    match subject.split("."):
        case ["live", verb, worker] if verb not in ("beat", "links"):
            return worker
        case ["plane", worker, _, *_] | ["kv", "ask", worker, _]:
            return worker
    return None


def answer(worker: str, asker: str, about: object) -> str:
    """Return the subject of a worker's reply.

    `asker` (two tokens, `USER.CONNECTION`) identifies the requester, and `about` identifies the request.
    """
    return f"{ANSWER}.{worker}.{asker}.{about}"


def answers(asker: str) -> str:
    """Return the wildcard for all replies of workers to one requester (`USER.CONNECTION`)."""
    return f"{ANSWER}.*.{asker}.*"


def dead(webhook: str) -> str:
    """Return the subject of the dead letters of a webhook."""
    return f"{DEAD}.{token(webhook)}"


def fact_of_worker(user: str, subject: str) -> str:
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

    All decisions of one kind have the same subject. More subjects would slow down the broker's check that no newer decision
    exists. Observations are on `fleet.observed.<entity>.<name>.<kind>`. `<name>` is the value of the field that the fact's
    `entity` names, or `all` with the entity `fleet`.
    """
    if isinstance(fact, Decision):
        return f"{DECIDED}.{fact.kind()}"
    assert isinstance(fact, Observation)
    name = "all" if fact.entity == "fleet" else str(getattr(fact, fact.entity))
    return f"{OBSERVED}.{fact.entity}.{token(name)}.{fact.kind()}"


def of_all(kind: type[Observation]) -> str:
    """Return the subject of all observations of this kind. The kind must be one about the whole fleet."""
    assert kind.entity == "fleet"
    return f"{OBSERVED}.fleet.all.{kind.kind()}"


@lru_cache(4096)
def token(name: str) -> str:
    """Return `name` as one subject token. Dots, wildcards and white space, which have a meaning in NATS, become `_`."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name) or "_"
