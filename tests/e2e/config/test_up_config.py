"""`holdfast up --config FILE` starts a whole fleet from the file alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import first_database
import pytest
from fleet import holdfast, streamed, undisturbed

from benchmarks.local_fleet import LocalFleet
from controller.adapters.embedded.free_port import free_port

PROMPT = (5, 6, 7)


def start(file: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start `up` with nothing but the file."""
    command = [sys.executable, "-m", "controller.cli", "up", "--config", str(file)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=clean)


@pytest.mark.slow
async def test_up_starts_a_fleet_from_a_file_alone(tmp_path: Path) -> None:
    data, port = tmp_path / "fleet", free_port()
    data.mkdir(0o700)
    first_database.lay_in_fleet(data)
    file = tmp_path / "fleet.toml"
    file.write_text(f"""
        data = "{data}"
        [up]
        workers = 2
        planner_mode = "off"
        [frontend]
        port = {port}
        [controller]
        chaos = true
        canary.interval_s = 0.5
        [worker]
        itl_ms = 1
    """)
    fleet = await LocalFleet(data, port, start(file, data / "up.log"), data / "up.log").ready()
    try:
        await fleet.healthy(2)
        status = json.loads(holdfast("status", "-o", "json", "--data", str(data)).stdout)
        assert [worker["id"] for worker in status["workers"]] == ["w0", "w1"]
        assert "planner" not in {one["role"] for one in status["processes"]}
        assert await streamed(fleet, PROMPT, 8) == undisturbed(PROMPT, 8)
        done = holdfast("chaos", "slow", "w1", "2", "--data", str(data))
        assert done.returncode == 0, done.stderr
        assert fleet.stop() == 0, fleet.last_words()
    finally:
        fleet.end()
