"""The environment takes precedence over `up`'s defaults, and flags over both."""

import argparse
from pathlib import Path

import pytest

from controller.processes.fleet_dir import FleetDir
from controller.processes.process_plan import plan
from controller.processes.up_flags import VARIABLES, add_arguments

GIVEN = {
    "--host": ("127.0.0.9", "127.0.0.8"),
    "--port": ("8123", "8124"),
    "--request-plane": ("nats", "tcp"),
    "--planner-mode": ("observe", "off"),
    "--engine": ("openai", "simulated"),
    "--upstreams": ("/upstreams/a.yaml", "/upstreams/b.yaml"),
    "--model": ("/models/a", "/models/b"),
}


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


@pytest.mark.parametrize("flag", VARIABLES)
def test_a_variable_overrides_the_default_and_a_flag_overrides_both(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, (variable, given) = flag[2:].replace("-", "_"), GIVEN[flag]
    assert str(getattr(parsed(), name)) != variable
    monkeypatch.setenv(VARIABLES[flag], variable)
    assert str(getattr(parsed(), name)) == variable
    assert str(getattr(parsed(flag, given), name)) == given


def test_frontends_listen_on_the_address_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_FRONTEND__HOST", "127.0.0.9")
    monkeypatch.setenv("HOLDFAST_CONTROLLER__CHAOS", "true")
    args = parsed()
    children = {child.role: child.environment for child in plan(args, FleetDir(tmp_path))}
    assert children["frontend"]["HOLDFAST_FRONTEND__HOST"] == "127.0.0.9"
    assert args.chaos and children["controller"]["HOLDFAST_CONTROLLER__CHAOS"] == "true"
