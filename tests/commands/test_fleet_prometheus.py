"""The Prometheus of a fleet follows its processes, is restarted when it ends, and is optional."""

import asyncio
import json
import os
import urllib.request
from pathlib import Path

import pytest
from prometheus_server import binary
from waits import until

from controller.adapters.embedded import prometheus as embedded
from controller.adapters.embedded.server import EmbeddedServer
from controller.processes import supervised_servers
from controller.processes.observability.scrape_targets import rule_files
from controller.processes.supervised_servers import FleetPrometheus
from events.process.presence import announce, withdraw


class Beside:
    """A fleet's Prometheus, and the servers that it announced."""

    def __init__(self, data: Path) -> None:
        self.data, self.lives = data, list[EmbeddedServer]()
        self.prometheus = FleetPrometheus(data, self.lives.append)

    def targets(self) -> set[str]:
        """Return the processes that it scrapes."""
        try:
            with urllib.request.urlopen(
                f"{self.lives[-1].url}/api/v1/targets?state=active", timeout=5
            ) as answer:
                return {one["labels"]["process"] for one in json.load(answer)["data"]["activeTargets"]}
        except OSError:  # it loads stored data, or is about to start
            return set()

    async def until(self, names: set[str]) -> None:
        async def scraped() -> bool:
            self.prometheus.tend()
            return await asyncio.to_thread(self.targets) == names

        await until(scraped, 30, f"the scraping of {names}", every_s=0.1)


@pytest.mark.slow
async def test_it_scrapes_the_present_processes_and_is_restarted_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(binary()).parent), prepend=os.pathsep)
    monkeypatch.setattr(supervised_servers, "WRITE_EVERY_S", 0.1)
    announce(tmp_path, "worker", "w0", "http://127.0.0.1:9")
    beside = Beside(tmp_path)
    await beside.prometheus.begin()
    try:
        await beside.until({"w0"})
        gone = announce(tmp_path, "worker", "w1", "http://127.0.0.1:9")
        announce(tmp_path, "nats", "nats", "nats://127.0.0.1:9")  # which has no metrics
        await beside.until({"w0", "w1"})
        withdraw(gone)
        beside.lives[0].process.kill()
        await until(lambda: len(beside.lives) > 1, 30)
        assert beside.lives[0].url == beside.lives[1].url
        await beside.until({"w0"})
        found = json.loads((tmp_path / "prometheus" / "targets.json").read_text())
        assert [group["labels"] for group in found] == [{"role": "worker", "process": "w0"}]
    finally:
        await beside.prometheus.server.stop()
    assert not beside.lives[-1].running


async def test_it_loads_the_alert_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(binary()).parent), prepend=os.pathsep)
    beside = Beside(tmp_path)
    await beside.prometheus.begin()
    try:
        written = (tmp_path / "prometheus" / "prometheus.yml").read_text()
        assert written.endswith(rule_files([str(embedded.RULES)]))
    finally:
        await beside.prometheus.server.stop()


async def test_without_a_prometheus_binary_the_fleet_continues_and_prints_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(embedded, "UNPACKED", tmp_path / "none")
    beside = Beside(tmp_path)
    await beside.prometheus.begin()
    beside.prometheus.tend()
    await beside.prometheus.server.stop()
    output = "".join(capsys.readouterr())
    assert "Prometheus is not running" in output and "make prometheus" in output
    assert beside.prometheus.server.log is None and not beside.lives
