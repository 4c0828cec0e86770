"""Plays transcripts: files of commands with recorded effects.

`test_request_transcripts` describes the format.
"""

import asyncio
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from json_types import Json
from scripted_plane import ScriptError
from transcript_frontend import TranscriptFrontend

from benchmarks.virtual_loop import VirtualLoop
from controller.deciders.fleet import DECIDERS_VERSION, FleetPolicy
from events import decisions, observations
from events.decisions import HealthStatus, Knobs
from events.fact import Decision, Fact
from events.wire import Chunk, Load, Logprob

INDENT = "    "  # of effects, below their command
CANNOT = "CANNOT: "  # before the reason why a command cannot be executed
CANARY = {"canary_key": "k", "canary": "c1", "check_type": "scheduled", "sent_under": 99, "latency_ms": 1.0}
OUTSIDE = 10**6  # a token outside any vocabulary


def play(text: str) -> str:
    """Return a transcript with the current effects of its commands. Each case has its own event loop, starting at time 0."""
    cases: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("case "):
            cases.append([])
        if not line.startswith(INDENT):
            cases[-1].append(line)
    played: list[str] = []
    for lines in cases:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            played += runner.run(_play(lines))
    return "\n".join(played) + "\n"


async def _play(lines: Sequence[str]) -> list[str]:
    """Play one case. Anything that its requests leave behind is recorded after its last command."""
    script = Script()
    played: list[str] = []
    end = 0
    for line in lines:
        played.append(line)
        if line and not line.startswith("#"):
            try:
                await script.carry_out(line)
            except ScriptError as error:
                script.record(f"{CANNOT}{error}")
            played += script.recorded()
            end = len(played)
    await script.end()
    return [*played[:end], *script.recorded(), *played[end:]]


class Script:
    """Executes the commands of one case.

        frontend SETTING=… | drains | ends      settings, before all else; the frontend shuts down
        worker W FIELD=…                        a worker joins (fields of `WorkerJoined` and `Profile`; kv=true)
        request R FIELD=…                       a client's request (fields of the body, and those of `TranscriptFrontend.ask`)
        R leaves                                its client closes the connection
        wait SECONDS                            time passes, with the frontend's ticks
        journal FACT [W] FIELD=…                the frontend reads a fact
        W sends R tokens=2 | wrong=2 | invalid=1 | text=… | finish=… | error=… | cached=… | logprob=…
        W reserves R cached=… | declines R why=… | commits R source=W2 unsaid=… [differs]
        W disconnects | hangs | connects | refuses | drains | reports FIELD=… (fields of `Load`)

    R[1] is a choice of a request with several. `wrong` tokens are those of a corrupt worker.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._made: TranscriptFrontend | None = None
        self._settings: Json = {}
        self._wait_from: float | None = None
        self._requests: set[str] = set()

    def recorded(self) -> list[str]:
        """Return the lines recorded since the last call."""
        lines, self._lines = self._lines, []
        return [INDENT + line for line in lines]

    def record(self, line: str) -> None:
        """Record an effect."""
        since = self._wait_from
        if since is not None and self._made is not None:
            line = f"[+{round(self._made.age_s() - since, 3):g} s] {line}"
        self._lines.append(line)

    @property
    def _frontend(self) -> TranscriptFrontend:
        if self._made is None:
            self._made = TranscriptFrontend({"port": 0, "model_folders": "/", **self._settings}, self.record)
        return self._made

    async def end(self) -> None:
        """End the case, and record anything that its requests leave behind."""
        if self._made is not None:
            await self._made.close()
            self._lines = [f"LEFT BEHIND: {what}" for what in self._made.leftovers()]

    async def carry_out(self, command: str) -> None:
        """Execute one command, and record its immediate effects."""
        if command.startswith("case "):
            return
        verb, *rest = shlex.split(command)
        if verb == "frontend" and rest not in (["drains"], ["ends"]):
            self._settings = _nested(_options(rest))
            return
        frontend = self._frontend
        if verb == "frontend":
            frontend.shut_down(at_once=rest == ["ends"])
        elif verb == "wait":
            self._wait_from = frontend.age_s()
            await frontend.pass_time(float(rest[0]))
            self._wait_from = None
        elif verb == "worker":
            frontend.join(rest[0], **_options(rest[1:]))
            self._journal("health_changed", rest[0], {"after": "healthy", "weight": 1.0})
            frontend.changed()
        elif verb == "request":
            self._requests.add(rest[0])
            frontend.ask(rest[0], **_options(rest[1:]))
        elif verb == "journal":
            worker = rest[1] if len(rest) > 1 and "=" not in rest[1] else ""
            self._journal(rest[0], worker, _options(rest[1 + bool(worker) :]))
        elif verb in self._requests:
            if rest != ["leaves"]:
                raise ScriptError("a client can only leave")
            frontend.leave(verb)
        else:
            self._worker(verb, rest[0], rest[1:])
        await frontend.settle()
        frontend.record_counts()

    # --- workers ------------------------------------------------------------------------------------------

    def _worker(self, worker: str, verb: str, rest: list[str]) -> None:
        plane = self._frontend.plane
        if worker not in plane.workers:
            raise ScriptError(f"there is no worker {worker}")
        there = plane.workers[worker]
        options = _options([word for word in rest if "=" in word])
        match verb:
            case "sends":
                self._sends(worker, rest[0], options)
            case "reserves":
                plane.reserves(worker, rest[0], options.get("cached", 0))
            case "declines":
                plane.declines(worker, rest[0], options["why"])
            case "commits":
                differs = "differs" in rest
                plane.commits(worker, rest[0], options["source"], options.get("unsaid", 0), differs=differs)
            case "disconnects":
                there.connected = False
                plane.lose(worker, "disconnected", "the connection broke")
                self._frontend.changed()
            case "hangs":
                there.stuck = True
                plane.lose(worker, "stalled", "its engine is stuck")
                self._frontend.changed()
            case "connects":
                there.connected, there.stuck, there.refuses, there.draining = True, False, False, False
                self._frontend.changed()
            case "refuses":
                there.refuses = True
            case "drains":
                there.draining = True
                self._frontend.changed()
            case "reports":
                there.others_work = options.pop("others_work", "")
                there.load = Load(**options)
            case _:
                raise ScriptError(f"a worker cannot do that: {verb}")

    def _sends(self, worker: str, name: str, options: Mapping[str, Any]) -> None:
        """Send the output of one engine step for one stream."""
        plane = self._frontend.plane
        stream = plane.opened(worker, name)
        tokens = stream.next(options.get("tokens", 0)) + stream.next(options.get("wrong", 0), wrong=True)
        tokens += [OUTSIDE] * options.get("invalid", 0)
        logprobs = [Logprob(options["logprob"]) for _ in tokens] if "logprob" in options else None
        chunk = Chunk(
            0,
            tokens,
            options.get("finish"),
            options.get("error"),
            logprobs,
            options.get("text"),
            options.get("cached"),
        )
        plane.chunk(worker, name, chunk)

    # --- the journal --------------------------------------------------------------------------------------

    def _journal(self, name: str, worker: str, fields: Json) -> None:
        self._frontend.read_journal(FACTS.get(name, _fact)(self._frontend, name, worker, fields))


# --- facts ------------------------------------------------------------------------------------------------------------


def _fact(frontend: TranscriptFrontend, name: str, worker: str, fields: Json) -> Fact:
    """Return a fact of this kind."""
    kind = "".join(word.title() for word in name.split("_"))
    made = getattr(observations, kind, None) or getattr(decisions, kind)
    if worker:
        fields = fields | {"worker": worker, "instance": frontend.instance(worker)}
    fields = {field: frontend.now() if value == "now" else value for field, value in fields.items()}
    if issubclass(made, Decision):
        fields["decided_at"] = frontend.now()
    return made(**fields)  # type: ignore[no-any-return]


def _canary(frontend: TranscriptFrontend, name: str, worker: str, fields: Json) -> Fact:
    """Return the result of a canary; a failed one is confirmed against an agreed golden."""
    fields = {"sent_at": frontend.now(), **CANARY, **fields}
    if name == "canary_failed":
        found = {"reason": "token_mismatch", "confirmed": True, "golden": "agreed", "attempts": 2}
        fields = found | fields
    return _fact(frontend, name, worker, fields)


def _health(frontend: TranscriptFrontend, name: str, worker: str, fields: Json) -> Fact:
    after = HealthStatus(fields.pop("after").upper())
    usual = {"reason": "test", "weight": 0.0}
    return _fact(
        frontend, name, worker, {**usual, **fields, "before": frontend.health(worker), "after": after}
    )


def _drain(frontend: TranscriptFrontend, name: str, worker: str, fields: Json) -> Fact:
    return _fact(frontend, name, worker, {"deadline": frontend.now(), "reason": "operator", **fields})


def _move(frontend: TranscriptFrontend, name: str, worker: str, fields: Json) -> Fact:
    if fields.get("until") == "past":
        fields["until"] = frontend.now() - timedelta(seconds=1)
    return _fact(frontend, name, worker, {"by": "operator", **fields})


def _device(frontend: TranscriptFrontend, name: str, worker: str, fields: Json) -> Fact:
    fields = {"device": "GPU-1", **fields}
    return _fact(frontend, name, worker, fields if name == "device_recovered" else {"fatal": False, **fields})


def _policy(frontend: TranscriptFrontend, name: str, worker: str, fields: Json) -> Fact:
    written = dict(FleetPolicy().adopted)
    written["budget"] = {**written["budget"], **fields}
    return _fact(frontend, name, worker, {"policy": written, "deciders_version": DECIDERS_VERSION})


def _degradation(frontend: TranscriptFrontend, name: str, worker: str, fields: Json) -> Fact:
    fields = {
        "model": "m",
        "before": 0,
        "after": 1,
        "ratio": 1.0,
        "capacity_rps": 1.0,
        "knobs": Knobs(**fields),
    }
    return _fact(frontend, name, worker, fields)


FACTS: dict[str, Callable[[TranscriptFrontend, str, str, Json], Fact]] = {
    "canary_passed": _canary,
    "canary_failed": _canary,
    "health_changed": _health,
    "drain_started": _drain,
    "move_requested": _move,
    "device_faulted": _device,
    "device_recovered": _device,
    "policy_adopted": _policy,
    "degradation_changed": _degradation,
}


def _options(words: list[str]) -> Json:
    """Return the values of `name=value` words: JSON if valid, otherwise text."""
    found: Json = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ScriptError(f"name=value is needed, not {word!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _nested(options: Mapping[str, object]) -> Json:
    """Return settings by group: `stall.floor_s` is `floor_s` of `stall`."""
    found: Json = {}
    for name, value in options.items():
        *groups, last = name.split(".")
        inner = found
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return found


def transcripts() -> list[Path]:
    """Return all transcripts."""
    return sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
