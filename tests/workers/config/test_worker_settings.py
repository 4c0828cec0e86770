"""A worker's settings: precedence of flags over the environment, and errors for invalid values."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from events.errors import BadSetting
from events.nats import keys
from events.nats.urls import BadBrokerUrl, with_keys
from events.process.presence import announce
from workers.config.settings import WorkerSettings, groups
from workers.config.settings_check import load_settings, with_broker_user
from workers.engines.build import build_engine


def test_flags_win_over_the_environment_and_strings_are_converted() -> None:
    environment = {
        "HOLDFAST_WORKER_PORT": "4000",
        "HOLDFAST_WORKER_ITL_MS": "2.5",
        "HOLDFAST_WORKER_CHAOS": "false",
        "HOLDFAST_WORKER_KV_BLOCKS": "",
        "HOLDFAST_NATS_URL": "nats://a:1",
    }
    settings = load_settings({"port": "5000", "data": "/x", "batch_max": "8", "name": None}, environment)
    assert (settings.port, settings.itl_ms, settings.chaos, settings.batch_max) == (5000, 2.5, False, 8)
    assert (settings.data, settings.name, settings.kv_blocks) == (Path("/x"), "w0", None)
    assert settings.nats_url == "nats://a:1"


def test_a_workers_own_broker_wins_over_the_fleets() -> None:
    environment = {"HOLDFAST_NATS_URL": "nats://a:1", "HOLDFAST_WORKER_NATS_URL": "nats://b:1"}
    assert load_settings({}, environment).nats_url == "nats://b:1"


def test_the_fleet_of_a_data_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text('{"nats_url": "nats://c:1"}')
    for flags, environment in (({"data": str(tmp_path)}, {}), ({}, {"HOLDFAST_DATA": str(tmp_path)})):
        assert load_settings(flags, environment).nats_url == "nats://c:1"
    named = {"data": str(tmp_path), "nats_url": "nats://d:1"}
    assert load_settings(named, {}).nats_url == "nats://d:1"
    assert load_settings({"data": str(tmp_path / "none")}, {}).nats_url == ""


def test_a_worker_that_joins_a_fleet_needs_a_unique_name(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text('{"nats_url": "nats://c:1"}')
    announce(tmp_path, "worker", "w0..w249", "")
    with pytest.raises(BadSetting, match=rf"name = 'w0': a worker of .* uses it \(pid {os.getpid()}\)"):
        load_settings({"data": str(tmp_path)}, {})
    assert load_settings({"data": str(tmp_path), "name": "x0"}, {}).name == "x0"
    assert load_settings({"data": str(tmp_path)}, {}, to_show=True).name == "w0", (
        "`holdfast settings` starts none"
    )
    assert load_settings({"data": str(tmp_path)}, {"HOLDFAST_NATS_URL": "nats://c:1"}).name == "w0", (
        "as `up` does"
    )


def test_an_openai_worker_needs_its_models_tokenizer(tmp_path: Path) -> None:
    flags = {"engine": "openai", "upstream": "http://x", "model": str(tmp_path)}
    with pytest.raises(BadSetting, match=r"tokenizer \(tokenizer.json\)"):
        load_settings(flags, {})
    (tmp_path / "tokenizer.json").touch()
    assert load_settings(flags, {}).model == str(tmp_path)


@pytest.mark.parametrize("engine", ["openai", "transformers"])
def test_only_simulated_engines_have_ranks(engine: str) -> None:
    with pytest.raises(BadSetting, match="tp = 4: only simulated engines have ranks"):
        load_settings({"engine": engine, "tp": "4"}, {})
    assert load_settings({"engine": "simulated", "tp": "4"}, {}).tp == 4


def test_many_workers_need_consecutive_ports() -> None:
    assert load_settings({"count": "3", "port": "65533"}, {}).port == 65533
    with pytest.raises(BadSetting, match="port = 65534: 3 workers need consecutive ports up to 65535"):
        load_settings({"count": "3", "port": "65534"}, {})


def test_the_nats_request_plane_needs_a_broker(tmp_path: Path) -> None:
    flags = {"request_plane": "nats", "data": str(tmp_path)}
    with pytest.raises(BadSetting, match=r"request_plane = 'nats': requires nats_url"):
        load_settings(flags, {})
    assert load_settings(flags, {"HOLDFAST_NATS_URL": "nats://a:1"}).request_plane == "nats"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("port", "70000", "port = '70000': expected `int` <= 65535"),
        ("kv_blocks", "few", "kv_blocks = 'few': expected `int | null`"),
        ("itl_ms", "nan", "itl_ms = 'nan': expected `float` >= 0"),
        ("engine", "gpu", "engine = 'gpu': expected one of simulated, transformers, openai"),
        ("chaos", "perhaps", "chaos = 'perhaps': expected `bool`"),
        ("name", "x" * 65, "expected `str` of length <= 64"),
    ],
)
def test_an_invalid_value_is_named(name: str, text: str, says: str) -> None:
    with pytest.raises(BadSetting) as refused:
        load_settings({name: text}, {})
    assert says in str(refused.value)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(BadSetting, match=r"port = 'x': .*; grace_s = '-1': "):
        load_settings({"port": "x", "grace_s": "-1"}, {})


def test_the_file_of_an_upstreams_key_is_read_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    key = tmp_path / "key"
    flags = {
        "engine": "openai",
        "upstream": "http://x",
        "model": str(tmp_path),
        "upstream_key_file": str(key),
    }
    with pytest.raises(BadSetting, match=r"upstream_key_file: .*key cannot be read: No such file"):
        load_settings(flags, {})
    key.write_text("hush\n")
    assert load_settings(flags, {}).upstream_key_file == str(key)
    with pytest.raises(BadSetting, match="upstream_key is set too"):
        load_settings(flags, {"HOLDFAST_WORKER_UPSTREAM_KEY": "hush"})
    with pytest.raises(BadSetting, match="only the openai engine has an upstream"):
        load_settings({"upstream_key_file": str(key)}, {})


def test_a_tokenizer_is_registered_with_a_path_that_is_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer.json").touch()
    monkeypatch.chdir(tmp_path)
    engine = build_engine(load_settings({"engine": "openai", "upstream": "http://x", "model": "m"}, {}))
    assert engine.identity.tokenizer == str(tmp_path / "m")


def test_the_key_of_an_upstream_is_not_shown() -> None:
    assert "hush" not in repr(load_settings({"upstream_key": "hush"}, {}))


@pytest.mark.skipif(
    find_spec("nixl") is not None, reason="needs an environment without NIXL: make clean install"
)
def test_nixl_without_its_extra_names_the_package_to_install() -> None:
    with pytest.raises(BadSetting, match=r"kv_transport = 'nixl': .*pip install -e"):
        load_settings({"kv_transport": "nixl"}, {})


def test_a_worker_that_joins_creates_its_missing_seed_and_waits_until_it_is_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "secrets" / "nats"
    folder.mkdir(parents=True)
    (folder / f"worker-x0+2{keys.ADMITTED_SUFFIX}").touch()  # the marker that the fleet creates
    (tmp_path / "fleet.json").write_text(json.dumps({"nats_url": with_keys("nats://c:1", folder)}))
    settings = load_settings({"data": str(tmp_path), "name": "x0", "count": 2}, {})
    assert keys.users(folder) == [], "reading the settings creates nothing"
    for _ in range(2):
        assert (
            with_broker_user(settings).nats_url
            == f"nats://c:1?nkey={folder}/worker-x0%2B2.nk&user=worker-x0%2B2"
        )
    assert keys.users(folder) == ["worker-x0+2"]


def test_no_seed_is_created_for_a_broker_outside_the_fleet(tmp_path: Path) -> None:
    settings = load_settings(
        {"name": "w9", "data": str(tmp_path)}, {"HOLDFAST_NATS_URL": "nats://c:1?keys=/nowhere"}
    )
    with pytest.raises(BadBrokerUrl, match=r"/nowhere has no seed for the account 'worker-w9'"):
        with_broker_user(settings)
    assert with_broker_user(load_settings({}, {"HOLDFAST_NATS_URL": "nats://c:1"})).nats_url == "nats://c:1"


def test_every_setting_is_described_in_one_group() -> None:
    described = [name for settings in groups().values() for name in settings]
    assert sorted(described) == sorted(WorkerSettings.__struct_fields__)
    assert all(text for settings in groups().values() for text in settings.values())
