"""A whole frontend in virtual time, with a scripted request plane.

It is the only part of the transcripts that depends on the frontend's classes. A rewrite of the frontend changes this module and
leaves the transcripts unchanged.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from itertools import groupby
from typing import Any

from frontend_kit import PROFILE, TOKENS, joined
from scripted_plane import SEED, PlaneWorker, ScriptedPlane, continuation, follow
from scripted_worker import FIRST, LAST, ScriptedWorker
from waits import turns, virtual

from controller.deciders.fleet import Fleet, evolve
from controller.frontend.director import Director, World
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.openai.request_head import AdmissionHeaders, Head
from controller.frontend.settings import FrontendSettings
from events.fact import Decision, Fact, Observation, Recorded
from events.observations import KvLayout, TrafficReported

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
TICK_S = 0.1
CHECKS = 10  # ticks between two checks for silent clients
TURNS = 15  # of the event loop, enough to complete everything caused by one command
KV = KvLayout(layers=2, kv_heads=2, head_size=8, element_bytes=2)
TOKEN_OF = {TOKENS.decode([token]): token for token in range(FIRST, LAST + 1)}
HIDDEN = {
    "frontend", "instance", "source_instance", "target_instance", "routed_under", "window_s", "sampling",
    "fingerprint", "since", "until",
}  # fmt: skip
UNREMARKABLE = (("model", "m"), ("dropped", 0))  # values that are omitted, too
RETRY_HEADERS = ("Retry-After", "retry-after-ms", "x-should-retry")
COUNTERS = {  # metrics with recorded changes, and their names in a transcript
    "dynamo_frontend_requests_total": "ended",
    "dynamo_frontend_model_cancellation_total": "cancelled",
    "dynamo_frontend_model_rejection_total": "rejected",
    "holdfast_refused_requests_total": "refused",
    "dynamo_frontend_model_migration_total": "attempt_failed",
    "dynamo_frontend_model_migration_duration_seconds_count": "outage_over",
    "dynamo_frontend_model_migration_max_seq_len_exceeded_total": "outgrown",
    "holdfast_preempted_requests_total": "preempted",
    "holdfast_requests_exposed_total": "exposed",
    "holdfast_stalled_streams_total": "stalled",
    "holdfast_queue_wait_seconds_count": "queue_wait",
}
GAUGES = ("queued", "parked", "put_off")
PLAIN_LABELS = {"model", "endpoint"}  # not shown


class LoopClock:
    """The time of the running loop. Implements `controller.ports.Clock`."""

    def now(self) -> datetime:
        return BEGAN + timedelta(seconds=self.monotonic())

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await virtual(seconds)


class Client(asyncio.Transport):
    """A client's connection: it reads at once, and compares each token with that of an undisturbed answer."""

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        seeds: Sequence[int | None],
        record: Callable[[str], None],
        *,
        texts: bool,
    ) -> None:
        """Start without output. `texts`: record text unchanged, because the engines return text without tokens."""
        super().__init__()
        self._name, self._prompt, self._seeds, self._record = name, prompt, seeds, record
        self._texts = texts
        self._got: list[list[int]] = [[] for _ in seeds]
        self._gone = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        text = bytes(data).decode()
        if text.startswith("HTTP/"):
            head, _, text = text.partition("\r\n\r\n")
            self._record(f"{self._name} -> {head.split()[1]}{_worker(_headers(head))}")
        words: dict[int, list[str]] = {}  # consecutive tokens of each choice
        for line in text.splitlines():
            if line.startswith(":"):
                self._flush(words)
                self._record(f'{self._name} -> comment "{line[1:].strip()}"')
            elif line == "data: [DONE]":
                self._flush(words)
                self._record(f"{self._name} -> done")
            elif line.startswith("data: "):
                self._event(json.loads(line[6:]), words)
        self._flush(words)

    def _event(self, event: Mapping[str, Any], words: dict[int, list[str]]) -> None:
        if "error" in event:
            self._flush(words)
            self._record(f"{self._name} -> error {event['error']['code']}")
        for choice in event.get("choices", ()):
            if choice.get("text"):
                words.setdefault(choice["index"], []).append(choice["text"])
            if (reason := choice.get("finish_reason")) is not None:
                self._flush(words)
                self._record(f"{self._of(choice['index'])} -> finish {reason}")

    def _flush(self, words: dict[int, list[str]]) -> None:
        for choice, texts in words.items():
            self.answered(choice, texts)
        words.clear()

    def answered(self, choice: int, texts: Sequence[str]) -> None:
        """Record arrived tokens, by their texts."""
        got, said = self._got[choice], self._of(choice)
        if self._texts:
            self._record(f"{said} -> text {''.join(texts)!r}")
            return
        for known, group in groupby(texts, TOKEN_OF.__contains__):
            if not known:
                self._record(f"{said} -> text {''.join(group)!r}")
                continue
            first, kinds = len(got) + 1, []
            for text in group:
                kinds.append(self._kind(choice, TOKEN_OF[text]))
                got.append(TOKEN_OF[text])
            for kind, same in groupby(kinds):
                last = first + len(list(same)) - 1
                numbers = f"{first}" if last == first else f"{first}..{last}"
                self._record(f"{said} -> tokens {numbers}{kind}")
                first = last + 1

    def _kind(self, choice: int, token: int) -> str:
        """Return how a token compares with the expected one."""
        got, seed = self._got[choice], self._seeds[choice]
        if continuation(self._prompt, len(got) + 1, seed) == [*got, token]:
            return ""
        return " behind wrong ones" if token == follow([*self._prompt, *got], seed) else " WRONG"

    def _of(self, choice: int) -> str:
        return f"{self._name}[{choice}]" if len(self._seeds) > 1 else self._name

    def whole(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """Record an answer that is not streamed."""
        self._record(f"{self._name} -> 200{_worker(headers)}")
        for choice in body["choices"]:
            self.answered(choice["index"], _pieces(choice["text"]))
            self._record(f"{self._of(choice['index'])} -> finish {choice['finish_reason']}")

    def is_closing(self) -> bool:
        return self._gone

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self._gone = True
        self._record(f"{self._name} -> connection closed")


class TranscriptFrontend:
    """One frontend. Everything visible from outside is passed to `record`."""

    def __init__(self, settings: Mapping[str, object], record: Callable[[str], None]) -> None:
        """Start on the running loop, without workers."""
        self._record = record
        self.plane = ScriptedPlane(record)
        self._clock = LoopClock()
        chosen = FrontendSettings.model_validate(settings)
        world = World("f1", self.plane, self._observe, self._clock, lambda: 0.0)
        self._director = Director(world, chosen)
        self._director.go_live()
        self._endpoints = OpenAiEndpoints(self._director)
        self._fleet, self._seq = Fleet(), 0
        self._prompts: dict[str, list[int]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._began = asyncio.get_running_loop().time()
        self._ticks = 0
        self._counts = self._read_counts()

    def _observe(self, fact: Observation, *, traceparent: str = "") -> None:
        if not isinstance(fact, TrafficReported):
            self._record(f"fact {_snake(type(fact).__name__)} {_fields(fact)}".rstrip())

    # --- the fleet ----------------------------------------------------------------------------------------

    def join(self, worker: str, *, tp: int = 1, kv: bool = False, **changes: Any) -> None:
        """Let a worker join, become healthy and be connected. `kv`: its streams can move with their KV cache."""
        known = {field.name for field in fields(PROFILE)}
        profile = PROFILE
        if kv:
            changes["kv"] = KV
            # a transfer is faster than recomputing at any length
            profile = replace(profile, prefill_tokens_per_s=100.0)
        profile = replace(profile, **{name: changes.pop(name) for name in known & changes.keys()})
        instance = changes.pop("instance", "i1")
        fact = joined(ScriptedWorker(worker, instance), tp=tp, profile=profile, url="virtual:", **changes)
        self.plane.workers[worker] = PlaneWorker(instance)
        self.read_journal(fact)

    def instance(self, worker: str) -> str:
        """Return the current instance of a worker."""
        return self._fleet.workers[worker].joined.instance

    def health(self, worker: str) -> object:
        """Return a worker's health status in the journal."""
        return self._fleet.workers[worker].health.status

    def now(self) -> datetime:
        """Return the current time."""
        return self._clock.now()

    def read_journal(self, *facts: Fact) -> None:
        """Let the frontend read facts from the journal, in one batch."""
        batch = []
        for fact in facts:
            self._seq += 1
            if isinstance(fact, Decision):
                fact = replace(fact, number=self._fleet.number + 1)
            batch.append(Recorded(self._seq, self.now(), fact, f"e{self._seq}"))
            self._fleet = evolve(self._fleet, batch[-1])
        self._director.absorb(self._fleet, batch)

    def changed(self) -> None:
        """Notify the frontend of a changed connection or a worker's report."""
        self._director.changed()

    # --- clients ------------------------------------------------------------------------------------------

    def ask(
        self, name: str, *, prompt: int = 3, like: str = "", tier: str = "standard", deadline_ms: float = 0.0,
        queue_ttl_ms: float = 0.0, retries: int = 0, stream: bool = True, n: int = 1, shown: str = "tokens",
        stop_text: int = 0, stop_token: int = 0, **body: object,
    ) -> None:  # fmt: skip
        """Send a completion request of a client.

        `like`: a request with the same prompt. `shown`: tokens or text. `stop_text` and `stop_token`: the number of the
        answer's token that ends it, by its text or by its id.
        """
        tokens = self._prompts.get(like)
        if tokens is None:
            tokens = [FIRST + (100 * len(self._prompts) + place) % (LAST - FIRST) for place in range(prompt)]
        self._prompts[name] = tokens
        self.plane.choices[name] = n
        body = {"model": "m", "prompt": tokens, "max_tokens": 8, "stream": stream, "temperature": 0, **body}
        if stop_text:
            body["stop"] = TOKENS.decode(continuation(tokens, stop_text, None)[-1:])
        if stop_token:
            body["stop_token_ids"] = continuation(tokens, stop_token, None)[-1:]
        if n > 1:
            body |= {"n": n, "temperature": 1.0, "seed": SEED}
        seeds = [SEED + choice if n > 1 else None for choice in range(n)]
        client = Client(name, tokens, seeds, self._record, texts=shown == "text")
        asked = AdmissionHeaders(
            deadline_s=deadline_ms / 1000 or None, line_s=queue_ttl_ms / 1000 or None, retries=retries
        )
        head = Head("completions", name, tier, "", "", asked=asked)
        self._asking[name] = asyncio.create_task(self._ask(name, head, json.dumps(body).encode(), client))

    async def _ask(self, name: str, head: Head, body: bytes, client: Client) -> None:
        response = await self._endpoints.answer(head, body, client)
        if response is None:
            return
        assert isinstance(response.body, bytes)
        answer = json.loads(response.body)
        if response.status == 200:
            client.whole(answer, response.headers)
            return
        hints = [
            f"{name.lower()}={response.headers[name]}" for name in RETRY_HEADERS if name in response.headers
        ]
        self._record(" ".join([f"{name} -> {response.status} {answer['error']['code']}", *hints]))

    def leave(self, name: str) -> None:
        """Close a client's connection."""
        self._asking[name].cancel()

    # --- time ---------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Run everything that is due now."""
        await turns(TURNS)

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, with the frontend's ticks."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (due := self._began + (self._ticks + 1) * TICK_S) <= end + 1e-6:
            await virtual(max(0.0, due - loop.time()))
            await self.settle()
            self._ticks += 1
            self._director.tick()
            if self._ticks % CHECKS == 0:
                self._endpoints.check(loop.time())
            await self.settle()
        await virtual(max(0.0, end - loop.time()))
        await self.settle()

    def age_s(self) -> float:
        """Return the seconds since the start."""
        return asyncio.get_running_loop().time() - self._began

    def shut_down(self, *, at_once: bool) -> None:
        """Stop admitting requests; `at_once`: end everything with an error."""
        if at_once:
            self._endpoints.cut_off()
        else:
            self._endpoints.drain()

    async def close(self) -> None:
        """Disconnect all clients."""
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await self.settle()
        await self._endpoints.intake.close()

    def leftovers(self) -> list[str]:
        """Return what is left of ended requests: there must be nothing."""
        found = []
        for name, there in self.plane.workers.items():
            found += [f"stream {stream.name} at {name}" for stream in there.open.values()]
            found += [f"reservation {stream.name} at {name}" for stream in there.reserved.values()]
        for endpoint in self._director.table.endpoints.values():
            counted = endpoint.active, endpoint.kept.requests, endpoint.tokens
            if counted != (0, 0, 0):
                found.append(f"counted at {endpoint.worker}: {counted}")
        counts = self._read_counts()
        found += [f"{name} is {counts[name]:g}" for name in GAUGES if counts[name]]
        found += [f"slot {name}" for name, _ in self._director.routing.slots.requests()]
        return found

    # --- counters and gauges ------------------------------------------------------------------------------

    def record_counts(self) -> None:
        """Record the metrics that have changed since the last call."""
        before, self._counts = self._counts, self._read_counts()
        counted, gauges = [], []
        for name in sorted(self._counts.keys() | before.keys()):
            now = self._counts.get(name, 0.0)
            more = now - before.get(name, 0.0)
            if not more:
                continue
            if name in GAUGES:
                gauges.append(f"{name}={now:g}")
            else:
                counted.append(name if more == 1 else f"{name} x{more:g}")
        if counted:
            self._record("counted " + ", ".join(counted))
        if gauges:
            self._record("now " + " ".join(gauges))

    def _read_counts(self) -> dict[str, float]:
        director = self._director
        director.metrics.settle()
        director.request_metrics.settle()
        found = {
            "queued": float(sum(director.admission.waiting().values())),
            "parked": float(len(director.driver.waiting.parked)),
            "put_off": float(len(director.preemption.put_off)),
        }
        requests, histograms = director.metrics.requests, director.metrics.histograms
        faults = director.metrics.faults
        for collector in (  # all metrics would take ten times as long
            requests.ended, requests.cancellations, requests.rejections, requests.refusals, requests.migrations,
            requests.over_cap, requests.preempted, faults.exposed, faults.stalled, histograms.migration_s,
            histograms.queue_s,
        ):  # fmt: skip
            for sample in (sample for family in collector.collect() for sample in family.samples):
                if sample.name in COUNTERS and sample.value:
                    shown = [v for k, v in sample.labels.items() if k not in PLAIN_LABELS and v]
                    name = " ".join([COUNTERS[sample.name], *shown])
                    found[name] = found.get(name, 0.0) + sample.value
        return found


def _pieces(text: str) -> list[str]:
    """Return the texts of a text's tokens; the text itself if it does not consist of tokens."""
    tokens = TOKENS.encode(text, special=False)
    pieces = [TOKENS.decode([token]) for token in tokens]
    return pieces if all(piece in TOKEN_OF for piece in pieces) else [text]


def _headers(head: str) -> dict[str, str]:
    lines = [line.partition(": ") for line in head.split("\r\n")[1:]]
    return {name: value for name, _, value in lines}


def _worker(headers: Mapping[str, str]) -> str:
    """Return the part of a response's headers about its worker."""
    shown = {"worker": headers.get("X-Holdfast-Worker"), "suspect": headers.get("X-Holdfast-Suspect")}
    return "".join(f" {name}={value}" for name, value in shown.items() if value)


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def _fields(fact: object) -> str:
    """Return the fields of a fact that differ from their defaults, the request first."""
    assert is_dataclass(fact)
    shown = []
    for field in fields(fact):
        value = getattr(fact, field.name)
        if field.name in HIDDEN or value == field.default or (field.name, value) in UNREMARKABLE:
            continue
        if field.name == "moves":
            shown += [f"{move.worker}={move.position}({move.reason})" for move in value]
        elif field.name == "request":
            shown.insert(0, value)
        else:
            shown.append(f"{field.name}={_value(value)}")
    return " ".join(shown)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{round(value, 2):g}"
    if isinstance(value, Enum):
        return str(value.value)
    text = str(value)
    return f'"{text}"' if " " in text or not text else text
