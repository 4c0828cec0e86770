"""Measures how late `holdfast trace replay` is with many streams at once, and its share of a core.

A fleet of simulated workers answers the streams.

    python -m benchmarks replay [--streams 2000] [--tokens 300] [--itl-ms 55] [--frontends 2] [--workers 8]
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.local_fleet import LocalFleet

START_MS = 2000  # within which all streams begin
PROMPT_TOKENS = 16
ENDS_S = 600.0


async def measured(a: argparse.Namespace) -> dict[str, object]:
    """Run it once and return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        row = '{"timestamp":%d,"input_length":%d,"output_length":%d}\n'
        lines = (row % (START_MS * n // a.streams, PROMPT_TOKENS, a.tokens) for n in range(a.streams))
        trace.write_text("".join(lines))
        flags = ["--workers", str(a.workers), "--frontends", str(a.frontends), "--itl-ms", str(a.itl_ms)]
        fleet = await LocalFleet.start(Path(folder) / "fleet", *flags).ready()
        try:
            command = [
                sys.executable,
                "-m",
                "controller.cli",
                "trace",
                "replay",
                str(trace),
                "--url",
                fleet.url,
            ]
            replay = await asyncio.create_subprocess_exec(
                *command, "-o", "json", stdout=asyncio.subprocess.PIPE
            )
            async with asyncio.timeout(ENDS_S):
                out, _ = await replay.communicate()
        finally:
            fleet.end()
    found = json.loads(out)
    generator = found["generator"]
    streaming = found["seconds"] - START_MS / 1e3
    return {
        "streams": found["requests"]["whole"],
        "failed": found["requests"]["failed"],
        "in_flight_max": generator["in_flight_max"],
        "tokens_per_s": round(found["tokens"]["output"] / streaming),
        "late_ms_p99": generator["late_ms"]["p99"],
        "loop_lag_ms_p99": generator["loop_lag_ms"]["p99"],
        "kept_up": generator["kept_up"],
        "cpu_share": generator["cpu_share"],
        "us_per_token": round(generator["cpu_share"] * found["seconds"] / found["tokens"]["output"] * 1e6, 1),
        "itl_ms": found["itl_ms"],
    }


def main() -> None:
    """Measure, and print."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--streams", type=int, default=2000)
    p.add_argument("--tokens", type=int, default=300)
    p.add_argument("--itl-ms", type=float, default=55)
    p.add_argument("--frontends", type=int, default=2)
    p.add_argument("--workers", type=int, default=8)
    print(json.dumps(asyncio.run(measured(p.parse_args())), indent=1))


if __name__ == "__main__":
    main()
