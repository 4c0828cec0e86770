"""`--help` shows the common flags of a large command; `--help-all` shows every flag in its group."""

import argparse
import re

import pytest

from controller.cli import ROLES, main, parser_for
from controller.config.flag_groups import COMMON, FLEET

FLAGS_MAX = 15  # without groups


def command(name: str) -> argparse.ArgumentParser:
    actions = parser_for({name})._actions
    (commands,) = [one for one in actions if isinstance(one, argparse._SubParsersAction)]
    parser: argparse.ArgumentParser = commands.choices[name]
    return parser


def text(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMON)
def test_every_flag_is_in_a_group(name: str) -> None:
    parser = command(name)
    ungrouped = [action.option_strings[0] for action in parser._optionals._group_actions]
    assert ungrouped == ["-h", "--help-all"]
    grouped = [flag for group in parser._action_groups[2:] for flag in group._group_actions]
    assert len(grouped) + 2 == len(parser._actions)


def test_up_has_all_groups_of_a_fleet() -> None:
    assert [group.title for group in command("up")._action_groups[2:]] == list(FLEET)


@pytest.mark.parametrize("name", [name for name in ("up", *ROLES) if name not in COMMON])
def test_a_role_without_groups_has_few_flags(name: str) -> None:
    assert len(command(name)._actions) <= FLAGS_MAX


def test_the_help_shows_the_common_flags_and_names_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    shown = text(capsys, "up", "--help")
    flags = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", shown, re.MULTILINE))
    assert flags == {*COMMON["up"], "--help", "--help-all"}
    assert all(re.search(rf"^  {re.escape(title)} +\d+  --", shown, re.MULTILINE) for title in FLEET)
    assert "`holdfast up --help-all`" in shown
    assert len(shown.splitlines()) < 50


def test_the_whole_help_shows_each_flag_below_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    shown = text(capsys, "up", "--help-all")
    router = shown.partition("\nRouter:\n")[2].partition("\n\n")[0]
    assert "--router-mode" in router and "--port" not in router
    assert all(f"  {action.option_strings[0]}" in shown for action in command("up")._actions)


def test_completion_offers_the_flags_of_all_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert all(flag in script for flag in ("--router-mode", "--chaos", "--help-all", "--prefill-tokens-max"))
