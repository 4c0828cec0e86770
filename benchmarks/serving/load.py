"""Loads an OpenAI-compatible endpoint with streams, and reports correctness, latency and throughput.

    python -m benchmarks load --url http://127.0.0.1:8000 --concurrency 64 --osl 64 --duration 5 \\
        [--procs 2] [--pids frontend=PID,worker=PID+PID] [--reference FILE|URL] [--itl]

Users send their next request as soon as they have an answer (a closed loop; `holdfast trace replay` sends at given times,
over the same connections), in any number of processes. Prints one JSON object. With `--reference` every answer is compared
with the undisturbed one: taken from another endpoint (URL: one request per prompt, before the load) or from a file that
`--save-reference` wrote.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import re
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from controller.trace.replay.endpoint import ClientLimits, ReplayTarget, Reply, now

ENDS_S = 2.0  # for cancelled requests
ANSWER_S = 3600.0  # the end of a run cancels its requests earlier


class Stream:
    """The events of one answer. With `keep` the events and their gaps are kept."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self.done = self.failed = False
        self.usage: int | None = None
        self.first = self.last = 0.0
        self.events: list[bytes] = []
        self.count = 0
        self.gaps: list[float] = []

    def take(self, event: bytes, instant: float) -> None:
        """Process an event that arrived at a time."""
        if event == b"[DONE]":
            self.done = True
            return
        if not self.first:
            self.first = instant
        elif self._keep:
            self.gaps.append(instant - self.last)
        self.last = instant
        self.count += 1
        if self._keep:
            self.events.append(event)
        if b'"completion_tokens":' in event and (found := re.search(rb'"completion_tokens":\s*(\d+)', event)):
            self.usage = int(found.group(1))
        if event[:8] == b'{"error"':
            self.failed = True


@dataclass
class Report:
    """The results of one process."""

    requests: int = 0
    ok: int = 0
    events: int = 0
    tokens: int = 0
    broken: int = 0
    checked: int = 0
    altered: int = 0
    stuck: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)
    bad: Counter[str] = field(default_factory=Counter)
    sample: str | None = None


def body(a: argparse.Namespace, user: int, *, stream: bool = True) -> dict[str, Any]:
    """Return the body of one user's request."""
    made: dict[str, Any] = {"model": a.model, "stream": stream, "max_tokens": a.osl} | json.loads(a.extra)
    prompt = a.prompt.replace("%i", str(user))
    if a.path.endswith("/chat/completions"):
        made["messages"] = [{"role": "user", "content": prompt}]
    else:
        made["prompt"] = prompt
    if stream and a.usage:
        made["stream_options"] = {"include_usage": True}
    return made


def text_of(events: list[bytes]) -> str:
    """Return the text of a stream's events."""
    choices = [choice for event in events for choice in json.loads(event).get("choices") or ()]
    return "".join(c.get("text") or (c.get("delta") or {}).get("content") or "" for c in choices)


def reference_from(a: argparse.Namespace) -> dict[str, str]:
    """Return each user's undisturbed answer: from a file, or from another endpoint."""
    if not a.reference:
        return {}
    if not a.reference.startswith("http"):
        found: dict[str, str] = json.loads(Path(a.reference).read_text())
        return found

    def answer_to(user: int) -> str:
        data = json.dumps(body(a, user, stream=False)).encode()
        headers = {"Content-Type": "application/json"}
        ask = urllib.request.Request(a.reference.rstrip("/") + a.path, data, headers)
        with urllib.request.urlopen(ask, timeout=120) as answer:
            choice = json.load(answer)["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    with ThreadPoolExecutor(min(64, a.concurrency)) as threads:
        return dict(
            zip(map(str, range(a.concurrency)), threads.map(answer_to, range(a.concurrency)), strict=True)
        )


class Load:
    """One process's share of the users."""

    def __init__(self, a: argparse.Namespace, users: range, share: int) -> None:
        self._a = a
        self._users = users
        self._left = share
        self._report = Report()
        name, _, value = a.header.partition(":")
        self._headers = {name.strip(): value.strip()} if a.header else {}
        self._target = ReplayTarget(a.url, limits=ClientLimits(idle_s=0.0) if a.fresh else ClientLimits())

    async def run(self) -> Report:
        a, report = self._a, self._report
        self._start = now() + a.warmup
        self._stop = self._start + a.duration
        tasks = [asyncio.create_task(self._user(user)) for user in self._users]
        await asyncio.sleep(max(0.0, self._start - now()))
        cpu, began = sum(os.times()[:2]), now()
        _, pending = await asyncio.wait(tasks, timeout=a.duration + a.warmup + a.drain)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=ENDS_S)
        await self._target.close()
        report.cpu = sum(os.times()[:2]) - cpu
        report.wall = now() - began if a.requests else min(now() - began, a.duration)
        report.stuck = len(pending)
        return report

    async def _user(self, user: int) -> None:
        a = self._a
        data = json.dumps(body(a, user)).encode()
        while now() < self._stop and self._left > 0:
            self._left -= 1
            stream = Stream(a.itl or bool(a.answers) or bool(a.save_reference))
            reply = await self._target.ask(
                "POST", a.path, data, take=stream.take, deadline_s=ANSWER_S, headers=self._headers
            )
            if reply.fault == "unreachable":
                self._report.bad["connect"] += 1
                await asyncio.sleep(0.05)
                continue
            inside = reply.began >= self._start and (a.requests or reply.ended <= self._stop)
            if inside:  # only requests completely inside the window count
                await self._count(reply, stream, user)

    async def _count(self, reply: Reply, stream: Stream, user: int) -> None:
        a, report = self._a, self._report
        report.requests += 1
        if reply.status != 200:
            report.bad[str(reply.status)] += 1
            report.rejected.append(reply.ended - reply.began)
            report.sample = report.sample or reply.body[:300].decode("utf8", "replace")
            await asyncio.sleep(a.backoff)
            return
        report.events += stream.count
        if reply.fault or not stream.done or stream.failed:
            report.broken += 1
            report.bad[("error_event_" if stream.failed else "") + (reply.fault or "whole")] += 1
            report.sample = report.sample or (stream.events[-1][:300].decode() if stream.events else None)
            return
        report.ok += 1
        report.tokens += stream.usage if stream.usage is not None else a.osl
        report.ttft.append((stream.first or reply.ended) - reply.began)
        report.e2e.append(reply.ended - reply.began)
        report.itl += stream.gaps
        if a.answers:
            report.checked += 1
            report.altered += text_of(stream.events) != a.answers[str(user)]


def percentiles(values: list[float], *at: int) -> dict[str, float | None]:
    """Return percentiles in milliseconds."""
    ordered = sorted(values)
    return {
        "max" if p == 100 else f"p{p}": round(
            ordered[min(len(ordered) - 1, round(p / 100 * (len(ordered) - 1)))] * 1e3, 3
        )
        if ordered
        else None
        for p in at
    }


def usage_of(pids: str) -> dict[str, tuple[float, int]]:
    """Return CPU seconds and bytes of each named group of processes."""
    out = {}
    for item in filter(None, pids.split(",")):
        name, _, numbers = item.partition("=")
        cpu, rss = 0.0, 0
        for number in numbers.split("+"):
            try:
                process = psutil.Process(int(number))
                times = process.cpu_times()
                cpu, rss = cpu + times.user + times.system, rss + process.memory_info().rss
            except psutil.Error:
                continue
        out[name] = (cpu, rss)
    return out


def child(a: argparse.Namespace, users: range, share: int, out: Any) -> None:
    """Run one process's share."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        out.put(runner.run(Load(a, users, share).run()))


def measure(a: argparse.Namespace) -> dict[str, Any]:
    """Run the load and return the results."""
    a.answers = reference_from(a)
    procs = min(a.procs, a.concurrency)
    out: Any = multiprocessing.Queue()
    bounds = [a.concurrency * n // procs for n in range(procs + 1)]
    share = a.requests // procs if a.requests else 1 << 60
    children = [
        multiprocessing.Process(target=child, args=(a, range(first, last), share, out), daemon=True)
        for first, last in itertools.pairwise(bounds)
    ]
    for process in children:
        process.start()
    time.sleep(a.warmup)
    before, began = usage_of(a.pids), now()
    busy = psutil.cpu_times()
    if not a.requests:
        time.sleep(a.duration)
        after, took, idle = usage_of(a.pids), now() - began, psutil.cpu_times()
    reports = [out.get() for _ in children]
    if a.requests:
        after, took, idle = usage_of(a.pids), now() - began, psutil.cpu_times()
    for process in children:
        process.join(2)
    used = sum(idle) - sum(busy) - (idle.idle - busy.idle) - (idle.iowait - busy.iowait)
    return summary(a, reports, (before, after, took)) | {"machine_cpu_pct": round(100 * used / took, 1)}


def summary(a: argparse.Namespace, reports: list[Report], processes: Any) -> dict[str, Any]:
    """Return one JSON object of all processes' reports."""
    before, after, took = processes
    wall = max(report.wall for report in reports)
    bad: Counter[str] = sum((report.bad for report in reports), Counter())

    def total(name: str) -> Any:
        return sum(getattr(report, name) for report in reports)

    def all_of(name: str) -> list[float]:
        return [value for report in reports for value in getattr(report, name)]

    out: dict[str, Any] = {
        "tag": a.tag,
        "concurrency": a.concurrency,
        "osl": a.osl,
        "wall": round(wall, 2),
        "requests": total("requests"),
        "ok": total("ok"),
        "rps": round(total("ok") / wall, 1),
        "tok_s": round(total("tokens") / wall),
        "events_s": round(total("events") / wall),
        "ttft_ms": percentiles(all_of("ttft"), 50, 99, 100),
        "e2e_ms": percentiles(all_of("e2e"), 50, 99),
        "bad": dict(bad),
        "broken": total("broken"),
        "stuck": total("stuck"),
        "client_cpu_pct": round(100 * total("cpu") / wall, 1),
    }
    if itl := all_of("itl"):
        out["itl_ms"] = percentiles(itl, 50, 90, 99, 100)
    if a.answers:
        out |= {"checked": total("checked"), "altered": total("altered")}
    if rejected := all_of("rejected"):
        out["reject_ms"] = percentiles(rejected, 50, 99)
    for name, (cpu, _) in before.items():
        spent = after[name][0] - cpu
        out[name] = {
            "cpu_pct": round(100 * spent / took, 1),
            "rss_mb": round(after[name][1] / 1e6, 1),
            "tok_per_cpu_s": round(total("tokens") / spent) if spent > 0.05 else None,
        }
    sample = next((report.sample for report in reports if report.sample), None)
    return out | ({"sample_error": sample} if sample else {})


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = p.add_argument
    add("--url", required=True)
    add("--path", default="/v1/chat/completions")
    add("--model", default="m")
    add("--concurrency", type=int, default=16)
    add("--osl", type=int, default=64, help="output tokens per request (default: 64)")
    add("--duration", type=float, default=5)
    add("--warmup", type=float, default=1)
    add("--requests", type=int, default=0, help="number of requests, instead of a duration")
    add("--drain", type=float, default=15)
    add("--procs", type=int, default=1)
    add("--prompt", default="hello world %i", help="prompt; %%i is the user's number")
    add(
        "--extra",
        default='{"ignore_eos":true,"temperature":0}',
        help="additional fields of the body, as JSON",
    )
    add("--itl", action="store_true", help="measure the time between events")
    add("--usage", type=int, default=1)
    add("--reference", default="", help="file or endpoint with the undisturbed answers")
    add("--save-reference", default="", help="write the answers of --reference URL to this file")
    add("--pids", default="", help="name=PID[+PID],…: CPU and memory of these processes over the window")
    add("--header", default="", help="an additional header line")
    add("--fresh", action="store_true", help="use a new connection for each request")
    add("--backoff", type=float, default=0)
    add("--tag", default="")
    return p


def main() -> None:
    """Measure, and print."""
    a = parser().parse_args()
    if a.save_reference:
        Path(a.save_reference).write_text(json.dumps(reference_from(a)))
    print(json.dumps(measure(a)))


if __name__ == "__main__":
    main()
