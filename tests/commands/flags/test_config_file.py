"""`--config FILE` provides settings and flags of `up`: defaults < file < environment < flags."""

import argparse
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typed_commands import run_command

from controller.cli import main
from controller.commands.configuration.config_file import TABLES, BadConfigFile, apply, arguments
from controller.commands.configuration.schema import schema
from controller.commands.configuration.template import template
from controller.commands.show_settings import rows
from controller.processes import up
from controller.processes.up_flags import SETTINGS

PORT = "HOLDFAST_FRONTEND__PORT"


def written(folder: Path, text: str) -> Path:
    (path := folder / "fleet.toml").write_text(text)
    return path


def variables(folder: Path, text: str, **environment: str) -> dict[str, str]:
    apply(written(folder, text), environment)
    return environment


def values(environment: Mapping[str, str]) -> dict[str, Any]:
    return {name: value for name, value, _ in rows(environment)}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """The arguments of each fleet that `up` would have started."""
    found: list[argparse.Namespace] = []

    def run(args: argparse.Namespace) -> int:
        found.append(args)
        return 0

    monkeypatch.setattr(up, "run", run)
    return found


def holdfast(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    return run_command(words, clean | environment)


@pytest.mark.slow
def test_the_example_of_the_documentation_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "commands.md").read_text()
    example = page.partition("```toml\n")[2].partition("```")[0]
    environment: dict[str, str] = {}
    assert apply(written(tmp_path, example), environment)["spares"] == 1
    assert environment["HOLDFAST_DATA"] == "/var/lib/holdfast"
    jsonschema.Draft202012Validator(schema()).validate(tomllib.loads(example))


def test_settings_become_variables(tmp_path: Path) -> None:
    text = """
        nats_url = "nats://a:1"
        admin_hosts = ["a", ".b"]
        [controller]
        chaos = true
        journal.max_age = "30d"
        policy.breaker.wait_min = 12.5
        policy.degradation.slos."llama-3.1" = {slo_throughput_rps = 5}
        [frontend]
        cors_origins = ["https://a.example"]
        ttft_deadlines = {premium = 500}
        admission_control = "deadline"
        [worker]
        itl_ms = 3
        gpus = ["0", "1"]
    """
    environment = variables(tmp_path, text)
    assert environment["HOLDFAST_ADMIN_HOSTS"] == "a,.b"
    assert environment["HOLDFAST_WORKER_GPUS"] == "0,1"
    shown = values({k: v for k, v in environment.items() if k != "HOLDFAST_WORKER_GPUS"})
    assert shown["controller.chaos"] is True
    assert shown["controller.journal.max_age"].days == 30
    assert shown["controller.policy.breaker.wait_min"].total_seconds() == 12.5
    assert shown["controller.policy.degradation.slos"]["llama-3.1"].slo_throughput_rps == 5
    assert shown["frontend.cors_origins"] == ("https://a.example",)
    assert shown["frontend.ttft_deadlines"] == {"premium": 500}
    assert shown["worker.itl_ms"] == 3


@pytest.mark.parametrize(
    ("environment", "flags", "port"),
    [
        (None, (), 8000),
        ({}, (), 8101),
        ({PORT: "8102"}, (), 8102),
        ({PORT: "8102"}, ("--port", "8103"), 8103),
    ],
    ids=["default", "file", "environment", "flag"],
)
def test_each_level_takes_precedence_over_the_one_before(
    environment: dict[str, str] | None,
    flags: tuple[str, ...],
    port: int,
    started: list[argparse.Namespace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PORT, "")
    monkeypatch.delenv(PORT)  # what the file sets is gone after the test
    for name, value in (environment or {}).items():
        monkeypatch.setenv(name, value)
    config = ("--config", str(written(tmp_path, "frontend.port = 8101\nup.workers = 5")))
    assert main(["up", *(() if environment is None else config), *flags]) == 0
    assert [(one.port, one.workers) for one in started] == [(port, 3 if environment is None else 5)]


def test_the_planners_mode_of_the_environment_takes_precedence_over_the_flag_in_the_file(
    started: list[argparse.Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, 'up.planner_mode = "off"')
    assert main(["up", "--config", str(path)]) == 0
    monkeypatch.setenv("HOLDFAST_PLANNER__MODE", "observe")
    assert main(["up", "--config", str(path)]) == 0
    assert [one.planner_mode for one in started] == ["off", "observe"]


def test_a_flag_replaces_the_list_of_the_file(started: list[argparse.Namespace], tmp_path: Path) -> None:
    path = written(tmp_path, 'up = {upstream = ["http://a", "http://b"], observability = true}')
    assert main(["up", "--config", str(path)]) == 0
    assert main(["up", f"--config={path}", "--upstream=http://c"]) == 0
    assert [one.upstream for one in started] == [["http://a", "http://b"], ["http://c"]]
    assert all(one.observability for one in started)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HOLDFAST_CONTROLLER__CANARY__CHECK_INTERVAL", "controller.canary.interval_s = 3"),
        ("HOLDFAST_CONTROLLER__CANARY", "controller.canary.interval_s = 3"),
        ("DYN_ADMISSION_CONTROL", 'frontend.admission_control = "deadline"'),
        ("DYN_ENGINE_REQUEST_LIMIT", "worker.engine_request_limit = 3"),
        ("HOLDFAST_NATS_URL", 'nats_url = "nats://a:1"'),
    ],
)
def test_another_name_of_a_setting_in_the_environment_takes_precedence(
    variable: str, text: str, tmp_path: Path
) -> None:
    assert variables(tmp_path, text, **{variable: "{}"}) == {variable: "{}"}


def test_an_empty_url_in_the_environment_counts_as_unset(tmp_path: Path) -> None:
    environment = variables(tmp_path, 'nats_url = "nats://a:1"', HOLDFAST_NATS_URL="")
    assert environment == {"HOLDFAST_NATS_URL": "nats://a:1"}


def test_a_role_reads_its_own_table(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    path = written(tmp_path, 'data = "d"\nfrontend.port = 1\nworker.port = 2\ncontroller.unknown = 3')
    apply(path, environment, ("worker",))
    assert environment == {"HOLDFAST_DATA": "d", "HOLDFAST_WORKER_PORT": "2"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("frontnd = 1", "frontnd is not a setting; did you mean frontend?"),
        ("xyz = 1", "xyz is not a setting; `holdfast settings` lists them all"),
        (
            "controller.canary.intervall_s = 3",
            "controller.canary.intervall_s is not a setting; did you mean controller.canary.interval_s?",
        ),
        ("worker.itlms = 3", "worker.itlms is not a setting; did you mean worker.itl_ms?"),
        ("up.workrs = 3", "up.workrs is not a setting; did you mean up.workers?"),
        ('controller.canary.interval_s = "soon"', "controller.canary.interval_s = 'soon': input should be"),
        ("frontend.port = 99999", "frontend.port = '99999': input should be less than or equal to 65535"),
        ("frontend.port = 1979-05-27", "frontend.port = 1979-05-27: must be text, a number"),
        ('worker.itl_ms = "x"', "worker.itl_ms = 'x': expected `float`"),
        ("controller.canary = 3", "controller.canary = 3: must be a table, [controller.canary]"),
        ("nats_url = 3", "nats_url = 3: must be text"),
        ("up.workers = 0", "up.workers = 0: '0' is not a number from 1"),
        ("up.observability = 1", "up.observability = 1: must be true or false"),
        ("up.upstream = [true]", "up.upstream = True: must be text or a number"),
        ("up.port = 1", "up.port is the setting frontend.port: write it there"),
        ("up.slo_ttft_ms = 1", "up.slo_ttft_ms is the setting controller.policy.degradation.slos"),
        ("x = ", "is not TOML: Invalid value (at"),
        ('webhooks = "x"', "webhooks is not a setting"),
    ],
)
def test_a_mistake_is_named_with_its_file(text: str, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    done = holdfast("up", "--config", str(path), "--data", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"holdfast: {path}") and says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["up", "frontend", "worker", "settings"])
def test_a_missing_file_is_named(command: str, tmp_path: Path) -> None:
    done = holdfast(command, "--config", str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stderr == f"holdfast: cannot read {tmp_path / 'none'}: No such file or directory\n"


def test_settings_that_need_one_another_may_come_from_file_and_flags(tmp_path: Path) -> None:
    variables(tmp_path, "frontend.park = true")
    with pytest.raises(BadConfigFile, match="webhooks"):
        variables(tmp_path, "[[notifier.webhooks]]\nname = 'x'")


def test_settings_shows_the_values_of_a_file(tmp_path: Path) -> None:
    done = holdfast("settings", "--config", str(written(tmp_path, "frontend.port = 8101")), "-o", "json")
    assert json.loads(done.stdout)["frontend.port"] == 8101


@pytest.mark.slow
def test_the_written_file_changes_nothing(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    assert apply(written(tmp_path, template()), environment) == {}
    assert environment == {}


@pytest.mark.slow
def test_the_written_file_without_comment_signs_has_every_default(tmp_path: Path) -> None:
    text = re.sub(r"^#(?=\w+ = )", "", template(), flags=re.MULTILINE)
    jsonschema.Draft202012Validator(schema()).validate(tomllib.loads(text))
    environment: dict[str, str] = {}
    table = apply(written(tmp_path, text), environment)
    assert values(environment) == values({}) | {"data": ".holdfast"}
    assert {"workers": 3, "upstream": []}.items() <= table.items()


@pytest.mark.slow
def test_the_written_file_has_every_setting() -> None:
    known = {name for name in values({}) if "." in name}
    place, found = "", set()
    for line in template().splitlines():
        if line.startswith("["):
            place = line.strip("[]")
        elif match := re.match(r"#(\w+) = |# (\w+): ", line):
            found.add(f"{place}.{match[1] or match[2]}")
    assert known <= found


@pytest.mark.slow
def test_the_schema_rejects_unknown_keys_and_wrong_types() -> None:
    validator = jsonschema.Draft202012Validator(schema())
    validator.check_schema(schema())
    for wrong in ({"x": 1}, {"controller": {"x": 1}}, {"frontend": {"port": "x"}}, {"up": {"workers": "3"}}):
        assert not validator.is_valid(wrong)
    journal = {"journal": {"max_bytes": "10GiB", "max_age": 60}}
    assert validator.is_valid({"controller": journal, "up": {"spares": "auto"}})


@pytest.mark.slow
def test_the_schema_is_printed() -> None:
    assert json.loads(holdfast("settings", "--schema").stdout) == json.loads(json.dumps(schema()))


@pytest.mark.slow
def test_a_file_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    assert holdfast("settings", "--write", str(path)).returncode == 0
    assert path.read_text() == template() == holdfast("settings", "--write").stdout
    done = holdfast("settings", "--write", str(path))
    assert (done.returncode, done.stderr) == (1, f"holdfast: cannot write {path}: File exists\n")


def test_flags_and_settings_of_up_are_all_known(tmp_path: Path) -> None:
    known = {*values({})}
    assert set(SETTINGS.values()) <= known
    assert {name.partition(".")[0] for name in known if "." in name} == set(TABLES)
    assert arguments(tmp_path, {}, {}, lambda one: None, ()) == []


@pytest.mark.parametrize("name", ["nats_url", "data", "fleet_key_file"])
def test_a_workers_file_does_not_override_the_variable_of_all_processes(tmp_path: Path, name: str) -> None:
    environment = {f"HOLDFAST_{name.upper()}": "environment"}
    apply(written(tmp_path, f'[worker]\n{name} = "file"'), environment, ("worker",))
    assert environment == {f"HOLDFAST_{name.upper()}": "environment"}


@pytest.mark.parametrize("name", ["name", "data", "nats_url", "fleet_key_file"])
def test_a_fleets_file_cannot_set_what_differs_between_its_workers(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadConfigFile, match=f"worker.{name}: `up` sets it for each worker"):
        variables(tmp_path, f'[worker]\n{name} = "x"')


def test_the_planner_mode_of_up_goes_before_the_planners_own(
    tmp_path: Path, started: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_PLANNER__MODE", "x")  # so that it is restored
    monkeypatch.delenv("HOLDFAST_PLANNER__MODE")
    path = written(tmp_path, '[up]\nplanner_mode = "off"\n[planner]\nmode = "observe"')
    assert main(["up", "--config", str(path)]) == 0
    assert [args.planner_mode for args in started] == ["off"]


def test_the_last_of_several_files_is_read_and_an_empty_name_is_refused(tmp_path: Path) -> None:
    (first := tmp_path / "a.toml").write_text("[frontend]\nport = 9001")
    (last := tmp_path / "b.toml").write_text("[frontend]\nport = 9002")
    shown = holdfast("settings", "--config", str(first), f"--config={last}", "-o", "json")
    assert json.loads(shown.stdout)["frontend.port"] == 9002
    refused = holdfast("settings", "--config=")
    assert (refused.returncode, refused.stderr) == (2, "holdfast: --config needs a FILE\n")


def test_settings_checks_the_flags_of_up_too(tmp_path: Path) -> None:
    refused = holdfast("settings", "--config", str(written(tmp_path, "[up]\nworker = 3")))
    assert (
        refused.returncode == 2 and "up.worker is not a setting; did you mean up.workers?" in refused.stderr
    )


@pytest.mark.parametrize(
    "line", ['database_url = ["postgresql://u:hunter2@h/db"]', '[worker]\nupstream_key = {a = "hunter2"}']
)
def test_an_error_shows_no_secret(tmp_path: Path, line: str) -> None:
    with pytest.raises(BadConfigFile) as refused:
        variables(tmp_path, line)
    assert "hunter2" not in str(refused.value)


def test_an_empty_model_or_list_means_that_there_is_none(
    tmp_path: Path, started: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOLDFAST_WORKER_MODEL", "HOLDFAST_NOTIFIER__WEBHOOKS"):
        monkeypatch.setenv(name, "x")  # so that it is restored
        monkeypatch.delenv(name)
    path = written(tmp_path, '[worker]\nmodel = ""\n[notifier]\nwebhooks = []')
    assert main(["up", "--config", str(path)]) == 0
    assert os.environ["HOLDFAST_NOTIFIER__WEBHOOKS"] == "" and started[0].model is None
