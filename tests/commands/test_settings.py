"""Settings come from defaults, the environment and flags; what makes no sense is named."""

import argparse
from datetime import timedelta
from pathlib import Path

import pytest

from controller.cli import main
from controller.commands.show_settings import rows
from controller.config.flags import add_flags, as_variables, gather
from controller.config.sections import effective, masked
from controller.config.variables import refuse_unknown
from controller.deciders.capacity import Slo
from controller.deciders.tiers import Tiers
from controller.frontend.settings import FrontendSettings
from controller.processes import ladder_flags, up_flags
from controller.processes.fleet_dir import FleetDir
from controller.processes.restart_plan import plan
from controller.runtime.settings import ControllerSettings
from events.errors import BadSetting, UsageError


def test_the_environment_reaches_into_policies() -> None:
    environment = {
        "HOLDFAST_CONTROLLER__CANARY__INTERVAL_S": "1.5",
        "HOLDFAST_CONTROLLER__POLICY__BREAKER__WAIT_MIN": "7",
        "HOLDFAST_CONTROLLER__CHAOS": "true",
    }
    settings = gather(ControllerSettings, "controller", {}, environment)
    assert settings.canary.interval_s == 1.5
    assert settings.policy.breaker.wait_min == timedelta(seconds=7)
    assert settings.policy.breaker.failures_max == 3, "what is not set keeps its default"
    assert settings.chaos


def test_a_flag_wins_over_the_environment() -> None:
    environment = {"HOLDFAST_CONTROLLER__ADMIN_PORT": "1234"}
    assert gather(ControllerSettings, "controller", {"admin_port": "4321"}, environment).admin_port == 4321


def test_the_breakers_wait_is_a_flag_of_the_controller_and_wins_over_the_environment() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, ControllerSettings)
    args = vars(parser.parse_args(["--breaker-wait", "7", "--breaker-backoff", "1.5"]))
    environment = {
        "HOLDFAST_CONTROLLER__POLICY__BREAKER__WAIT_MIN": "9",
        "HOLDFAST_CONTROLLER__POLICY__BREAKER__FAILURES_MAX": "4",
    }
    breaker = gather(ControllerSettings, "controller", args, environment).policy.breaker
    assert (breaker.wait_min, breaker.backoff, breaker.failures_max) == (timedelta(seconds=7), 1.5, 4)
    with pytest.raises(BadSetting, match="wait_min"):
        gather(ControllerSettings, "controller", {"policy.breaker.wait_min": "soon"}, {})


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (
            "HOLDFAST_CONTROLLER__CANARY__INTERVALL_S",
            "1",
            "HOLDFAST_CONTROLLER__CANARY__INTERVALL_S is not a setting",
        ),
        ("HOLDFAST_CONTROLLER__CHAOS__MORE", "1", "chaos has nothing below it"),
        ("HOLDFAST_CONTROLLER__CANARY__INTERVAL_S", "-1", "controller.canary.interval_s = '-1'"),
        (
            "HOLDFAST_CONTROLLER__POLICY__BREAKER__WAIT_MIN",
            "soon",
            "controller.policy.breaker.wait_min = 'soon'",
        ),
        (
            "HOLDFAST_CONTROLLER__POLICY__DRAIN__WAIT",
            "-1",
            "^controller.policy.drain: wait is -1.0: it must be",
        ),
    ],
)
def test_what_makes_no_sense_is_named(variable: str, value: str, says: str) -> None:
    with pytest.raises(BadSetting, match=says.replace(".", r"\.")):
        gather(ControllerSettings, "controller", {}, {variable: value})


def test_workers_that_are_named_by_their_ports_are_not_behind_the_broker() -> None:
    flags = {"static": "127.0.0.1:9", "request_plane": "nats"}
    with pytest.raises(BadSetting, match="static names workers that are reached without a broker"):
        gather(FrontendSettings, "frontend", flags, {})


def test_defaults_are_shown_as_they_would_be_typed_and_empty_ones_not_at_all() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, FrontendSettings)
    text = parser.format_help()
    assert "(default: 3)" in text
    assert "(default: ()" not in text and "(default: {" not in text


def test_a_section_may_have_flags_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, FrontendSettings)
    args = vars(parser.parse_args(["--router-mode", "random", "--no-kv-events", "--port", "7"]))
    below = {"HOLDFAST_FRONTEND__ROUTER__MODE": "kv", "HOLDFAST_FRONTEND__ROUTER__TTL_SECS": "5"}
    settings = gather(FrontendSettings, "frontend", args, below)
    assert (settings.port, settings.router.mode, settings.router.kv_events) == (7, "random", False)
    assert settings.router.ttl_secs == 5, "what no flag says keeps what the environment says"
    assert settings.router.temperature == 0
    assert as_variables("frontend", FrontendSettings, args) == {
        "HOLDFAST_FRONTEND__ROUTER__MODE": "random",
        "HOLDFAST_FRONTEND__ROUTER__KV_EVENTS": "False",
        "HOLDFAST_FRONTEND__PORT": "7",
    }
    with pytest.raises(BadSetting, match=r"frontend\.router\.temperature = '-1'"):
        gather(FrontendSettings, "frontend", {"router.temperature": "-1"}, {})


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_fleet_is_not_begun_with_a_routing_that_frontends_would_refuse(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--router-mode", "best"]) == 2
    assert "frontend.router.mode = 'best': input should be 'kv'" in capsys.readouterr().err


def test_frontends_of_a_fleet_are_told_how_to_route(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    up_flags.add_arguments(parser)
    args = parser.parse_args(["--router-mode", "round-robin", "--frontends", "2"])
    told = [c.environment for c in plan(args, FleetDir(tmp_path)) if c.role == "frontend"]
    assert [own["HOLDFAST_FRONTEND__ROUTER__MODE"] for own in told] == ["round-robin"] * 2


def test_workers_do_not_publish_what_no_frontend_wants_to_hear(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    up_flags.add_arguments(parser)

    def told(*flags: str) -> set[str | None]:
        children = plan(parser.parse_args(flags), FleetDir(tmp_path))
        return {c.environment.get("HOLDFAST_WORKER_KV_EVENTS") for c in children if c.role == "worker"}

    assert (told(), told("--no-kv-events")) == ({None}, {"false"})


def test_the_seeds_names_stand_for_ours_wherever_they_are_given() -> None:
    policy = "HOLDFAST_CONTROLLER__POLICY__"
    environment = {
        "HOLDFAST_CONTROLLER__CANARY__CHECK_INTERVAL": "3",
        f"{policy}BREAKER": '{"failure_threshold": 7, "recovery_timeout_sec": 5, "half_open_max_calls": 1}',
        f"{policy}DEGRADATION__SLOS": '{"llama-3.1": {"slo_throughput": 4}}',
        f"{policy}DEGRADATION__PRIORITY_TIERS": "premium,standard",
    }
    settings = gather(ControllerSettings, "controller", {}, environment)
    breaker, degradation = settings.policy.breaker, settings.policy.degradation
    assert (settings.canary.interval_s, breaker.failures_max, breaker.wait_min) == (
        3,
        7,
        timedelta(seconds=5),
    )
    assert degradation.slos["llama-3.1"].slo_throughput_rps == 4
    assert degradation.priority_tiers == ("premium", "standard")
    ours = {
        "HOLDFAST_FRONTEND__BREAKER__FAILURE_THRESHOLD": "9",
        "HOLDFAST_FRONTEND__BREAKER__SUCCESS_THRESHOLD": "1",
    }
    assert gather(FrontendSettings, "frontend", {}, ours).breaker.failures_max == 9


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"BREAKER__SUCCESS_THRESHOLD": "2"}, "success_threshold = '2': here it is 1, always"),
        ({"BREAKER": '{"half_open_max_calls": 3}'}, "half_open_max_calls = 3: here it is 1, always"),
        ({"BREAKER": '{"failure_threshold": 3, "failures_max": 3}'}, "failures_max is given twice"),
        ({"BREAKER__FAILURE_THRESHOLD": "3", "BREAKER__FAILURES_MAX": "3"}, "failures_max is given twice"),
        ({"DEGRADATION__PRIORITY_TIERS": "gold,lead"}, "tier_default is 'standard', which is none of"),
    ],
)
def test_a_seeds_name_that_cannot_be_obeyed_is_refused(environment: dict[str, str], says: str) -> None:
    whole = {f"HOLDFAST_CONTROLLER__POLICY__{name}": value for name, value in environment.items()}
    with pytest.raises(BadSetting, match=says):
        gather(ControllerSettings, "controller", {}, whole)


def _up(tmp_path: Path, role: str, *flags: str) -> dict[str, str]:
    """Return what `up` with these flags tells the processes of a role."""
    parser = argparse.ArgumentParser()
    up_flags.add_arguments(parser)
    args = parser.parse_args(flags)
    up_flags.check(args)
    (told,) = [c.environment for c in plan(args, FleetDir(tmp_path)) if c.role == role]
    return dict(told)


def test_a_fleet_is_told_its_objectives_and_tiers_by_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ladder_flags.SLOS, '{"m": {"slo_ttft_ms": 9}, "*": {"slo_tpot_ms": 8}}')
    flags = ("--slo-throughput", "12.5", "--max-batch-size", "64", "--slo-ttft-ms", "700")
    told = _up(tmp_path, "controller", *flags, "--priority-tiers", "gold,lead", "--tier-default", "lead")
    policy = gather(ControllerSettings, "controller", {}, told).policy.degradation
    assert policy.slo("any") == Slo(
        slo_throughput_rps=12.5, slo_ttft_ms=700, slo_tpot_ms=8, max_batch_size=64
    )
    assert policy.slo("m") == Slo(slo_ttft_ms=9)
    assert policy.tiers == Tiers(("gold", "lead"), "lead")


def test_latencies_may_be_promised_without_a_throughput(tmp_path: Path) -> None:
    told = _up(tmp_path, "controller", "--slo-ttft-ms", "700")
    policy = gather(ControllerSettings, "controller", {}, told).policy.degradation
    assert policy.slo("any") == Slo(slo_ttft_ms=700)


def test_spares_are_workers_besides_that_are_told_so(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    up_flags.add_arguments(parser)
    servers = [part for n in range(3) for part in ("--upstream", f"http://h:{n + 1}")]
    for flags, workers, spare in (
        (["--workers", "2", "--spares", "1"], ["w0", "w1", "s0"], {}),
        (["--workers", "16", "--spares", "auto"], [f"w{n}" for n in range(16)] + ["s0"], {}),
        (["--workers", "15", "--spares", "auto"], [f"w{n}" for n in range(15)], {}),
        (["--engine", "openai", "--model", str(tmp_path), *servers, "--spares", "1"], ["w0", "w1", "s0"],
         {"HOLDFAST_WORKER_UPSTREAM": "http://h:3"}),
    ):  # fmt: skip
        args = parser.parse_args(flags)
        up_flags.check(args)
        children = {c.name: c.environment for c in plan(args, FleetDir(tmp_path)) if c.role == "worker"}
        assert list(children) == workers
        told = {name for name, given in children.items() if given.get("HOLDFAST_WORKER_SPARE") == "true"}
        assert told == {name for name in workers if name.startswith("s")}
        assert not told or spare.items() <= children["s0"].items()


def test_what_becomes_of_a_spare_is_told_also_where_all_of_them_come_from_elsewhere(tmp_path: Path) -> None:
    told = _up(tmp_path, "controller", "--spares-on-return", "release")
    assert gather(ControllerSettings, "controller", {}, told).policy.spares.on_return == "release"
    assert not [name for name in _up(tmp_path, "controller") if "SPARES" in name]


def test_a_fleet_is_told_how_often_requests_may_move(tmp_path: Path) -> None:
    told = _up(tmp_path, "frontend", "--migration-limit", "0", "--on-corruption", "error")
    settings = gather(FrontendSettings, "frontend", {}, told)
    assert (settings.migration_limit, settings.on_corruption) == (0, "error")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--spare-threshold", "4"), "--spare-threshold is for --spares auto"),
        (("--spares", "2", "--spare-threshold", "4"), "--spare-threshold is for --spares auto"),
        (("--priority-tiers", "gold"), "two different ones at least"),
        (("--tier-default", "gold"), "none of the priority_tiers"),
        (("--migration-limit", "-1"), "frontend.migration_limit = '-1'"),
        (("--on-corruption", "hope"), "frontend.on_corruption = 'hope'"),
    ],
)
def test_a_fleet_is_not_begun_with_flags_that_make_no_sense(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *flags]) == 2
    assert says in capsys.readouterr().err


def test_objectives_that_are_no_json_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ladder_flags.SLOS, "llama=3")
    with pytest.raises(UsageError, match="is no JSON object of models"):
        _up(tmp_path, "controller", "--slo-throughput", "1")


def test_a_misspelt_section_is_refused() -> None:
    with pytest.raises(BadSetting, match="HOLDFAST_CONTROLER__CHAOS is not a setting"):
        refuse_unknown({"HOLDFAST_CONTROLER__CHAOS": "1", "HOME": "x", "HOLDFAST_WORKER_NAME": "w0"})


def test_passwords_are_masked() -> None:
    assert masked("postgresql://me:hush@db:5432/x") == "postgresql://me:***@db:5432/x"
    shown = effective({"HOLDFAST_DATABASE_URL": "postgresql://me:hush@db/x"})
    assert "hush" not in str(shown)
    assert shown["controller.policy.breaker.failures_max"] == 3


def test_the_settings_command_shows_every_role_and_no_secret() -> None:
    environment = {"HOLDFAST_WORKER_UPSTREAM_KEY": "hush", "HOLDFAST_FRONTEND__MIGRATION_LIMIT": "1"}
    shown = {name: value for name, value, _ in rows(environment)}
    assert shown["frontend.migration_limit"] == 1
    assert shown["worker.engine"] == "simulated"
    assert shown["controller.policy.health.failures_max"] == 3
    assert "hush" not in str(shown)
