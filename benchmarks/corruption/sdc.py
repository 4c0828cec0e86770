"""Measures how canaries detect silent data corruption, with single-weight faults in a real model.

Hundreds of faults of each kind are injected.

    python -m benchmarks sdc [--faults 200] [--seed 1] [--probes 10000] [--model DIR] [--json FILE]

Measured for each fault: whether it altered users' answers (16 prompts × 48 tokens), and whether the canaries detected it (4
prompts × 32 tokens, by tokens, and by top-5 logprobs within the calibrated tolerance). Canaries are chosen, compared and
calibrated by the controller's own code (`controller.runtime.canary.goldens`). Also computed: the canary intervals until a
fault convicts, under the rules of 0.2.0 and the current ones (`conviction_delay`; `--faults 25 --probes 0` shows it in a few
minutes). Then thousands of healthy probes, through the real engine and under load, give the number of false alarms.

An answer is checked by reading the healthy answer through the faulty model in one pass. The answers diverge at the first position
where the model would generate another token. A free run diverges at the same position, because this engine
computes a replayed token with the same bits as a generated one. One fault in fifty is also run freely, and compared.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.corruption import conviction_delay
from benchmarks.corruption.sdc_alarms import false_alarms
from benchmarks.corruption.sdc_bench import Bench, prepared
from benchmarks.corruption.weight_faults import KINDS, AnyFaultInjector, WeightFault, draw_fault
from controller.runtime.canary.goldens import GoldenDifference
from workers.engines.tiny import build_tiny

FREE_RUN_EVERY = 50
# engines.md, top-5 within 1e-3: detected faults, those of them that altered user tokens, faults that altered user tokens.
REFERENCE = {
    "any one bit": (65, 39, 40), "exponent top bit": (183, 183, 188), "other exponent bit": (173, 114, 120),
    "sign": (154, 112, 123), "top-4 mantissa bits": (134, 31, 35), "low mantissa bits": (11, 0, 0),
    "one row zeroed": (152, 152, 163), "16×16 tile zeroed": (194, 194, 199),
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """The effect of one fault, and which canaries detected it."""

    fault: WeightFault
    harmful: bool
    tokens: bool
    plain: bool
    exact: bool
    covering: bool
    checksum: bool
    noticed_before: tuple[str, ...] = ()  # covering questions that detect it, under the rules of 0.2.0
    noticed: tuple[str, ...] = ()  # and under the current ones

    @property
    def embedding(self) -> bool:
        return "embed_tokens" in self.fault.weight


def examined(
    bench: Bench, fault: WeightFault, surgeon: AnyFaultInjector, healthy: int, free_run: bool
) -> Seen:
    """Inject one fault, record what users and canaries see, and revert it."""
    surgeon.inflict(fault)
    try:
        harmful = bench.altered()
        if free_run and not bench.confirms(harmful):
            raise SystemExit(f"{fault}: replay and free run disagree; the benchmark cannot be trusted")
        plain = bench.differences(bench.plain)
        covering, before = bench.noticed()
        return Seen(
            fault=fault,
            harmful=harmful,
            tokens=any(d.reason in ("token_mismatch", "non_finite") for d in plain),
            plain=any(d.reason for d in plain),
            exact=any(d.reason or d.distance for d in plain),
            covering=any(d.reason for d in covering),
            checksum=bench.checksum() != healthy,
            noticed_before=_ids(bench, before),
            noticed=_ids(bench, covering),
        )
    finally:
        surgeon.heal()


def _ids(bench: Bench, found: Sequence[GoldenDifference]) -> tuple[str, ...]:
    """Return the covering questions that showed a difference."""
    return tuple(one.id for one, seen in zip(bench.covering, found, strict=True) if seen.reason)


def delay(bench: Bench, seen: Sequence[Seen]) -> dict[str, Any]:
    """Return the detection delays of the faults that covering canaries detect, under the rules of 0.2.0 and the current ones."""
    questions = [
        conviction_delay.Question(q.id, q.prompt, q.tokens, q.top_k)
        for q in (one.golden for one in bench.covering)
    ]
    found = [(one.noticed_before, one.noticed) for one in seen]
    return conviction_delay.compared(questions, found, bench.settings)


def measured(bench: Bench, kind: str, faults: int, seed: int) -> Iterator[Seen]:
    """Yield the effect of each of `faults` faults of one kind; other seeds draw other faults."""
    weights = bench.stepper.model.parameters()
    surgeon, healthy, draw = AnyFaultInjector(weights), bench.checksum(), random.Random(f"{kind}/{seed}")
    for number in range(faults):
        fault = draw_fault(weights, kind, draw)
        yield examined(bench, fault, surgeon, healthy, free_run=number % FREE_RUN_EVERY == 0)
    if bench.checksum() != healthy or bench.altered():
        raise SystemExit("the model was not restored; the benchmark cannot be trusted")


def summary(kind: str, seen: Sequence[Seen]) -> dict[str, Any]:
    """Return one row of the table: the number of faults of each kind; `_harmful` counts those that altered user tokens."""

    def count(found: Callable[[Seen], bool]) -> int:
        return sum(found(one) for one in seen)

    caught, caught_harmful, altered = REFERENCE[kind]
    row: dict[str, Any] = {"fault": kind, "faults": len(seen), "harmful": count(lambda s: s.harmful)}
    for name in ("tokens", "plain", "exact", "covering", "checksum"):
        row[name] = count(lambda s, name=name: getattr(s, name))  # type: ignore[misc]
        row[f"{name}_harmful"] = count(lambda s, name=name: getattr(s, name) and s.harmful)  # type: ignore[misc]
    row["embedding_harmful"] = count(lambda s: s.embedding and s.harmful)
    row["embedding_harmful_plain"] = count(lambda s: s.embedding and s.harmful and s.plain)
    row["embedding_harmful_covering"] = count(lambda s: s.embedding and s.harmful and s.covering)
    row["reference"] = {"caught": caught, "caught_harmful": caught_harmful, "harmful": altered}
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as markdown."""
    lines = [
        "| fault | altered user tokens | tokens 4×32 | top-5 logprobs | exact top-5 | covering, top-5 logprobs "
        "| harmful in embeddings: plain, covering | checksum | reference ±1e-3 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        known = r["reference"]
        lines.append(
            f"| {r['fault']} | {r['harmful']} | {r['tokens']} ({r['tokens_harmful']}) "
            f"| {_share(r, 'plain')} | {r['exact']} ({r['exact_harmful']}) | **{_share(r, 'covering')}** "
            f"| {r['embedding_harmful']}: {r['embedding_harmful_plain']}, {r['embedding_harmful_covering']} "
            f"| {r['checksum']} of {r['faults']} | {known['caught']} ({known['caught_harmful']} of {known['harmful']}"
            f"{_percent(known['caught_harmful'], known['harmful'])}) |"
        )
    return "\n".join(lines)


def _share(row: dict[str, Any], name: str) -> str:
    caught = row[f"{name}_harmful"]
    return f"{row[name]} ({caught}{_percent(caught, row['harmful'])})"


def _percent(part: int, whole: int) -> str:
    return f", {100 * part / whole:.1f} %" if whole else ""


def main() -> None:
    """Run, and print the table and the count of false alarms."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--faults", type=int, default=200, help="faults of each kind (default: 200)")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS), metavar="KIND")
    parser.add_argument("--seed", type=int, default=1, help="seed of the faults (default: 1)")
    parser.add_argument("--probes", type=int, default=10_000, help="healthy probes (default: 10000; 0: none)")
    parser.add_argument("--model", type=Path, help="the tiny model's folder (default: built now)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or build_tiny(Path(scratch) / "tiny")
        bench = prepared(folder, args.threads)
        seen = {}
        for kind in args.kinds:
            began = time.monotonic()
            seen[kind] = list(measured(bench, kind, args.faults, args.seed))
            print(f"{kind}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        rows = [summary(kind, found) for kind, found in seen.items()]
        late = delay(bench, [one for found in seen.values() for one in found])
        print(
            f"tolerance {bench.tolerance:g}\n\n{table(rows)}\n\n{conviction_delay.table(late)}\n", flush=True
        )
        alarms = asyncio.run(false_alarms(folder, bench, args.probes, args.threads)) if args.probes else {}
        print(json.dumps(alarms))
    if args.json:
        faults = [asdict(one) for found in seen.values() for one in found]
        result = {
            "tolerance": bench.tolerance,
            "rows": rows,
            "delay": late,
            "false_alarms": alarms,
            "faults": faults,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
