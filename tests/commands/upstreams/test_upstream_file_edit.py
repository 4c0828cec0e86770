"""Edits of the file of upstreams: one entry changes, and comments, order and everything else stay."""

from pathlib import Path

import pytest

from controller.commands.upstreams.file_edit import NotEditable, add, edit_file, remove, set_pause
from events.errors import HoldfastError, UsageError
from workers.config.upstreams import BadUpstreams, parse_upstreams

FILE = """\
# the first rack
defaults: {key_file: /k}
upstreams:
  - name: a  # the oldest
    url: http://a
    limits:
      requests_max: 8

  # the second rack
  - {name: b, url: "http://b", weight: 0.5}
  -
    name: c
    url: http://c
# the end
"""


def test_an_added_entry_is_the_last_of_the_list() -> None:
    after = add(FILE, {"name": "d", "url": "https://d:1", "tls": {"ca_file": "/ca"}})
    line = "  - {name: d, url: 'https://d:1', tls: {ca_file: /ca}}\n"
    assert after == FILE.replace("# the end\n", f"{line}# the end\n")


@pytest.mark.parametrize("before", ["", "upstreams: []\n", "defaults: {zone: x}\nupstreams: [] # none\n"])
def test_the_first_entry_can_be_added(before: str) -> None:
    (entry,) = parse_upstreams(add(before, {"name": "d", "url": "http://d"}).encode())
    assert (entry.name, entry.url) == ("d", "http://d")


def test_a_removed_entry_leaves_the_others_and_the_comments() -> None:
    assert remove(FILE, "b") == FILE.replace('  - {name: b, url: "http://b", weight: 0.5}\n', "")
    assert remove(FILE, "c") == FILE.replace("  -\n    name: c\n    url: http://c\n", "")
    first = "  - name: a  # the oldest\n    url: http://a\n    limits:\n      requests_max: 8\n"
    assert remove(FILE, "a") == FILE.replace(first, "")


@pytest.mark.parametrize("between", ["", "  # the only one", "\n  # the only one"])
def test_the_last_entry_can_be_removed(between: str) -> None:
    text = f"upstreams:{between}\n  - {{name: a, url: 'http://a'}}\n"
    assert parse_upstreams(remove(text, "a").encode()) == ()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("a", "      requests_max: 8\n", "      requests_max: 8\n    pause: true\n"),
        ("b", "weight: 0.5}", "weight: 0.5, pause: true}"),
        ("c", "url: http://c\n", "url: http://c\n    pause: true\n"),
    ],
)
def test_a_pause_is_added_to_its_entry_and_taken_back(name: str, before: str, after: str) -> None:
    paused = set_pause(FILE, name, True)
    assert paused == FILE.replace(before, after)
    assert set_pause(paused, name, False) == paused.replace("pause: true", "pause: false")
    assert set_pause(paused, name, True) == paused


def test_unknown_and_known_names_are_errors() -> None:
    with pytest.raises(UsageError, match="the file lists no upstream d"):
        remove(FILE, "d")
    with pytest.raises(UsageError, match="the file lists no upstream d"):
        set_pause(FILE, "d", True)
    with pytest.raises(UsageError, match="the file lists a already"):
        add(FILE, {"name": "a", "url": "http://d"})


def test_an_invalid_entry_is_refused() -> None:
    with pytest.raises(BadUpstreams, match=r"weight: expected `float` <= 1\.0"):
        add(FILE, {"name": "d", "url": "http://d", "weight": 2.0})


def test_a_list_in_brackets_is_edited_by_hand() -> None:
    text = "upstreams: [{name: a, url: 'http://a'}]\n"
    with pytest.raises(NotEditable, match="written in brackets"):
        remove(text, "a")
    with pytest.raises(NotEditable, match="written in brackets"):
        add(text, {"name": "d", "url": "http://d"})
    assert parse_upstreams(set_pause(text, "a", True).encode())[0].pause


def test_an_edit_that_would_change_another_entry_is_refused() -> None:
    text = "upstreams:\n  - &one {name: a, url: 'http://a'}\n  - {<<: *one, name: b, url: 'http://b'}\n"
    with pytest.raises((NotEditable, BadUpstreams)):
        set_pause(text, "a", True)


def test_the_file_is_replaced_atomically_and_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    file, link = tmp_path / "up.yaml", tmp_path / "link.yaml"
    file.write_text(FILE)
    file.chmod(0o640)
    link.symlink_to(file)
    before = file.stat().st_ino
    edit_file(link, lambda text: remove(text, "b"))
    assert link.is_symlink()
    assert (file.stat().st_mode & 0o777, file.stat().st_ino == before) == (0o640, False)
    assert file.read_text() == remove(FILE, "b")
    with pytest.raises(UsageError):
        edit_file(link, lambda text: remove(text, "b"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.yaml", "up.yaml"]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="cannot be edited: No such file"):
        edit_file(tmp_path / "up.yaml", str)
