"""Webhook settings, and the error message for each invalid one."""

import base64
import json
from pathlib import Path

import pytest
from typed_commands import run_command

from controller.config.flags import gather
from controller.webhooks.settings import DEFAULT_KINDS, NotifierSettings, Webhook, checked
from events import codec
from events.errors import BadSetting

VARIABLE = "HOLDFAST_NOTIFIER__WEBHOOKS"
KEY = f"whsec_{base64.b64encode(bytes(32)).decode()}"


def settings(*webhooks: dict[str, object], **also: str) -> NotifierSettings:
    found = gather(NotifierSettings, "notifier", {}, {VARIABLE: json.dumps(webhooks), **also})
    found.check()
    return found


def test_default_kinds_apply_unless_others_are_named() -> None:
    assert settings({"url": "https://host/a"}).webhooks[0].kinds == DEFAULT_KINDS
    assert settings({"url": "https://host/a", "kinds": ["canary_failed"]}).webhooks[0].kinds == (
        "canary_failed",
    )
    assert set(checked(["all"])) == set(codec.KINDS)


def test_an_unknown_kind_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean breaker_opened"):
        checked(["breakers_opened"])
    with pytest.raises(ValueError, match=r"unknown kind 'x': docs/reference/events\.md"):
        checked(["x"])


def test_the_name_of_a_webhook_does_not_reveal_its_url(tmp_path: Path) -> None:
    (file := tmp_path / "url").write_text("https://hooks.slack.com/services/T0/B0/secret\n")
    by_file, itself = Webhook(url=f"@{file}"), Webhook(url="https://hooks.slack.com/services/T0/B0/secret")
    assert by_file.called == itself.called and by_file.address == itself.address
    assert by_file.called.startswith("hooks-slack-com-") and "secret" not in by_file.called
    assert "services" not in repr(itself) and "services" not in str(itself)
    assert Webhook(url="https://host/a").called != Webhook(url="https://host/b").called
    assert Webhook(url="https://host/a", name="pager").durable == "webhook-pager"


@pytest.mark.parametrize(
    ("webhook", "says"),
    [
        ({"url": "ftp://host"}, "'ftp://host' is not a webhook URL, such as https://host/path"),
        ({"url": "https://host:0/"}, "is not a webhook URL"),
        ({"url": "https://ho st/"}, "is not a webhook URL"),
        ({"url": "@/nowhere/at/all"}, "/nowhere/at/all cannot be read: No such file or directory"),
        ({"url": "https://host", "template": "teams"}, "'cloudevents', 'slack' or 'pagerduty'"),
        (
            {"url": "https://host", "template": "pagerduty"},
            "needs a secret file: the one with the routing key",
        ),
        ({"url": "https://host", "name": "a b"}, "name = 'a b'"),
        ({"url": "https://host", "kind": "x"}, "extra inputs are not permitted"),
        ({"url": "https://host", "secret_file": "/nowhere"}, "/nowhere cannot be read"),
        ({}, "field required"),
    ],
)
def test_an_invalid_webhook_is_rejected_with_a_reason(webhook: dict[str, object], says: str) -> None:
    with pytest.raises(BadSetting) as refused:
        settings(webhook)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("text", "template", "says"),
    [
        ("", "cloudevents", "is empty"),
        ("secret", "cloudevents", "line 1 is not a key: it must be whsec_ and 24 to 64 bytes in base64"),
        (f"{KEY}\nwhsec_AAAA", "slack", "line 2 is not a key"),
        ("\n".join([KEY] * 9), "cloudevents", "it has 9 keys: it must have 1 to 8"),
        (
            "too short",
            "pagerduty",
            "not a PagerDuty routing key: the file must hold only its 32 letters and digits",
        ),
    ],
)
def test_an_invalid_secret_file_is_reported(tmp_path: Path, text: str, template: str, says: str) -> None:
    (file := tmp_path / "secret").write_text(text)
    with pytest.raises(BadSetting) as refused:
        settings({"url": "https://host", "template": template, "secret_file": str(file)})
    assert says in str(refused.value) and str(file) in str(refused.value)


def test_duplicate_names_and_an_empty_list_are_rejected() -> None:
    with pytest.raises(BadSetting, match="two webhooks are named 'a'"):
        settings({"url": "https://x", "name": "a"}, {"url": "https://y", "name": "a"})
    with pytest.raises(BadSetting, match="the notifier needs HOLDFAST_NOTIFIER__WEBHOOKS"):
        settings()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--webhook", "https://x", "--webhook-kinds", "breakers_opened"), "did you mean breaker_opened"),
        (("--webhook-kinds", "breaker_opened"), "--webhook-kinds, --webhook-template and --webhook-secret-file require"),
        (
            ("--webhook", "https://x", "--webhook", "https://y", "--webhook", "https://z",
             "--webhook-template", "slack", "--webhook-template", "slack"),
            "--webhook-template is given 2 times, --webhook 3 times: give it once for all, or once for each",
        ),
        (("--webhook", "x"), "'x' is not a webhook URL"),
    ],
)  # fmt: skip
def test_up_rejects_invalid_flags_before_it_starts_anything(
    tmp_path: Path, flags: tuple[str, ...], says: str
) -> None:
    done = run_command(("up", "--data", str(tmp_path / "fleet"), *flags), {})
    assert done.returncode in (1, 2) and says in done.stderr and not (tmp_path / "fleet").exists()


def test_up_rejects_invalid_webhooks_from_the_environment(tmp_path: Path) -> None:
    said = {VARIABLE: json.dumps([{"url": "https://x", "kinds": ["breakers_opened"]}])}
    done = run_command(("up", "--data", str(tmp_path / "fleet")), said)
    assert done.returncode in (1, 2) and "did you mean breaker_opened" in done.stderr


def test_settings_show_no_url() -> None:
    shown = {VARIABLE: json.dumps([{"url": "https://hooks/secret", "name": "pager"}])}
    for output in ("text", "json"):
        done = run_command(("settings", "-o", output), shown)
        assert done.returncode == 0 and "pager" in done.stdout and "secret'" not in done.stdout
        assert "hooks/secret" not in done.stdout
