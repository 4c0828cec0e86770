"""Settings are read from defaults, the environment and flags; invalid ones are named."""

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
from controller.processes import ladder_flags, up_checks, up_flags
from controller.processes.fleet_dir import FleetDir
from controller.processes.process_plan import plan
from controller.runtime.settings import ControllerSettings
from events.errors import BadSetting, UsageError


def test_the_environment_sets_fields_of_policies() -> None:
    environment = {
        "HOLDFAST_CONTROLLER__CANARY__INTERVAL_S": "1.5",
        "HOLDFAST_CONTROLLER__POLICY__BREAKER__WAIT_MIN": "7",
        "HOLDFAST_CONTROLLER__CHAOS": "true",
    }
    settings = gather(ControllerSettings, "controller", {}, environment)
    assert settings.canary.interval_s == 1.5
    assert settings.policy.breaker.wait_min == timedelta(seconds=7)
    assert settings.policy.breaker.failures_max == 3, "unset fields keep their defaults"
    assert settings.chaos


def test_a_flag_takes_precedence_over_the_environment() -> None:
    environment = {"HOLDFAST_CONTROLLER__ADMIN_PORT": "1234"}
    assert gather(ControllerSettings, "controller", {"admin_port": "4321"}, environment).admin_port == 4321


def test_the_breakers_wait_is_a_flag_of_the_controller_with_precedence_over_the_environment() -> None:
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
        ("HOLDFAST_CONTROLLER__CHAOS__MORE", "1", "chaos has no settings of its own"),
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
def test_an_invalid_setting_is_named(variable: str, value: str, says: str) -> None:
    with pytest.raises(BadSetting, match=says.replace(".", r"\.")):
        gather(ControllerSettings, "controller", {}, {variable: value})


def test_static_workers_cannot_be_reached_through_the_broker() -> None:
    flags = {"static": "127.0.0.1:9", "request_plane": "nats"}
    with pytest.raises(BadSetting, match="static workers are reached without a broker"):
        gather(FrontendSettings, "frontend", flags, {})


def test_help_shows_defaults_as_typed_and_omits_empty_ones() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, FrontendSettings)
    text = parser.format_help()
    assert "(default: 3)" in text
    assert "(default: ()" not in text and "(default: {" not in text


def test_a_section_may_have_its_own_flags() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, FrontendSettings)
    args = vars(parser.parse_args(["--router-mode", "random", "--no-kv-events", "--port", "7"]))
    below = {"HOLDFAST_FRONTEND__ROUTER__MODE": "kv", "HOLDFAST_FRONTEND__ROUTER__TTL_SECS": "5"}
    settings = gather(FrontendSettings, "frontend", args, below)
    assert (settings.port, settings.router.mode, settings.router.kv_events) == (7, "random", False)
    assert settings.router.ttl_secs == 5, "fields without a flag keep the value of the environment"
    assert settings.router.temperature == 0
    assert as_variables("frontend", FrontendSettings, args) == {
        "HOLDFAST_FRONTEND__ROUTER__MODE": "random",
        "HOLDFAST_FRONTEND__ROUTER__KV_EVENTS": "False",
        "HOLDFAST_FRONTEND__PORT": "7",
    }
    with pytest.raises(BadSetting, match=r"frontend\.router\.temperature = '-1'"):
        gather(FrontendSettings, "frontend", {"router.temperature": "-1"}, {})


@pytest.mark.parametrize("command", ["up", "demo"])
def test_up_and_demo_reject_router_settings_that_frontends_would_reject(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--router-mode", "best"]) == 2
    assert "frontend.router.mode = 'best': input should be 'kv'" in capsys.readouterr().err


def test_up_passes_router_flags_to_its_frontends(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    up_flags.add_arguments(parser)
    args = parser.parse_args(["--router-mode", "round-robin", "--frontends", "2"])
    environments = [c.environment for c in plan(args, FleetDir(tmp_path)) if c.role == "frontend"]
    assert [own["HOLDFAST_FRONTEND__ROUTER__MODE"] for own in environments] == ["round-robin"] * 2


def test_workers_do_not_publish_kv_events_if_no_frontend_uses_them(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    up_flags.add_arguments(parser)

    def kv_events(*flags: str) -> set[str | None]:
        children = plan(parser.parse_args(flags), FleetDir(tmp_path))
        return {c.environment.get("HOLDFAST_WORKER_KV_EVENTS") for c in children if c.role == "worker"}

    assert (kv_events(), kv_events("--no-kv-events")) == ({None}, {"false"})


def test_the_seeds_names_of_settings_are_accepted_everywhere() -> None:
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
        ({"BREAKER__SUCCESS_THRESHOLD": "2"}, "success_threshold = '2': the value is fixed at 1"),
        ({"BREAKER": '{"half_open_max_calls": 3}'}, "half_open_max_calls = 3: the value is fixed at 1"),
        ({"BREAKER": '{"failure_threshold": 3, "failures_max": 3}'}, "failures_max is given twice"),
        ({"BREAKER__FAILURE_THRESHOLD": "3", "BREAKER__FAILURES_MAX": "3"}, "failures_max is given twice"),
        ({"DEGRADATION__PRIORITY_TIERS": "gold,lead"}, "tier_default is 'standard', which is not one of"),
    ],
)
def test_a_seeds_setting_with_an_unsupported_value_is_rejected(
    environment: dict[str, str], says: str
) -> None:
    whole = {f"HOLDFAST_CONTROLLER__POLICY__{name}": value for name, value in environment.items()}
    with pytest.raises(BadSetting, match=says):
        gather(ControllerSettings, "controller", {}, whole)


def _up(tmp_path: Path, role: str, *flags: str) -> dict[str, str]:
    """Return the environment that `up` with these flags gives to the process of a role."""
    parser = argparse.ArgumentParser()
    up_flags.add_arguments(parser)
    args = parser.parse_args(flags)
    up_checks.check(args)
    (environment,) = [c.environment for c in plan(args, FleetDir(tmp_path)) if c.role == role]
    return dict(environment)


def test_up_passes_objectives_and_tiers_to_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ladder_flags.SLOS, '{"m": {"slo_ttft_ms": 9}, "*": {"slo_tpot_ms": 8}}')
    flags = ("--slo-throughput", "12.5", "--max-batch-size", "64", "--slo-ttft-ms", "700")
    environment = _up(
        tmp_path, "controller", *flags, "--priority-tiers", "gold,lead", "--tier-default", "lead"
    )
    policy = gather(ControllerSettings, "controller", {}, environment).policy.degradation
    assert policy.slo("any") == Slo(
        slo_throughput_rps=12.5, slo_ttft_ms=700, slo_tpot_ms=8, max_batch_size=64
    )
    assert policy.slo("m") == Slo(slo_ttft_ms=9)
    assert policy.tiers == Tiers(("gold", "lead"), "lead")


def test_latency_objectives_do_not_need_a_throughput(tmp_path: Path) -> None:
    environment = _up(tmp_path, "controller", "--slo-ttft-ms", "700")
    policy = gather(ControllerSettings, "controller", {}, environment).policy.degradation
    assert policy.slo("any") == Slo(slo_ttft_ms=700)


def test_spares_are_additional_workers_marked_as_spares(tmp_path: Path) -> None:
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
        up_checks.check(args)
        children = {c.name: c.environment for c in plan(args, FleetDir(tmp_path)) if c.role == "worker"}
        assert list(children) == workers
        spares = {name for name, given in children.items() if given.get("HOLDFAST_WORKER_SPARE") == "true"}
        assert spares == {name for name in workers if name.startswith("s")}
        assert not spares or spare.items() <= children["s0"].items()


def test_the_role_of_a_returning_worker_is_passed_on_even_without_own_spares(tmp_path: Path) -> None:
    environment = _up(tmp_path, "controller", "--spares-on-return", "release")
    assert gather(ControllerSettings, "controller", {}, environment).policy.spares.on_return == "release"
    assert not [name for name in _up(tmp_path, "controller") if "SPARES" in name]


def test_up_passes_migration_settings_to_its_frontends(tmp_path: Path) -> None:
    environment = _up(tmp_path, "frontend", "--migration-limit", "0", "--on-corruption", "error")
    settings = gather(FrontendSettings, "frontend", {}, environment)
    assert (settings.migration_limit, settings.on_corruption) == (0, "error")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--spare-threshold", "4"), "--spare-threshold requires --spares auto"),
        (("--spares", "2", "--spare-threshold", "4"), "--spare-threshold requires --spares auto"),
        (("--priority-tiers", "gold"), "at least two distinct tiers"),
        (("--tier-default", "gold"), "not one of the priority_tiers"),
        (("--migration-limit", "-1"), "frontend.migration_limit = '-1'"),
        (("--on-corruption", "hope"), "frontend.on_corruption = 'hope'"),
    ],
)
def test_up_rejects_invalid_flags(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *flags]) == 2
    assert says in capsys.readouterr().err


def test_objectives_that_are_not_json_are_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ladder_flags.SLOS, "llama=3")
    with pytest.raises(UsageError, match="is not a JSON object of models"):
        _up(tmp_path, "controller", "--slo-throughput", "1")


def test_a_misspelt_section_is_rejected() -> None:
    with pytest.raises(BadSetting, match="HOLDFAST_CONTROLER__CHAOS is not a setting"):
        refuse_unknown({"HOLDFAST_CONTROLER__CHAOS": "1", "HOME": "x", "HOLDFAST_WORKER_NAME": "w0"})


def test_passwords_are_masked() -> None:
    assert masked("postgresql://me:hush@db:5432/x") == "postgresql://me:***@db:5432/x"
    shown = effective({"HOLDFAST_DATABASE_URL": "postgresql://me:hush@db/x"})
    assert "hush" not in str(shown)
    assert shown["controller.policy.breaker.failures_max"] == 3


def test_the_settings_command_shows_every_role_and_no_secrets() -> None:
    environment = {"HOLDFAST_WORKER_UPSTREAM_KEY": "hush", "HOLDFAST_FRONTEND__MIGRATION_LIMIT": "1"}
    shown = {name: value for name, value, _ in rows(environment)}
    assert shown["frontend.migration_limit"] == 1
    assert shown["worker.engine"] == "simulated"
    assert shown["controller.policy.health.failures_max"] == 3
    assert "hush" not in str(shown)
