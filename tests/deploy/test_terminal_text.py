"""Names and reasons from others are never interpreted by a terminal or as a report's markup."""

import io
import json
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from controller.cli import main
from controller.commands.operator_commands import event_line
from controller.commands.plan_now import show
from controller.commands.status import print_status
from controller.commands.top import FleetSeen, picture
from controller.demo import cli
from controller.demo.clients import TokenDifference
from controller.demo.report import DemoReport, ReportRow, table
from controller.processes.console import warn
from controller.replay.pages import escaped
from controller.replay.sentences import line
from controller.terminal_text import SafeStream, escape_controls, safe_output, safe_values
from events.fact import Recorded
from events.observations import EngineFaulted
from events.process import presence

EVIL = "w1\x1b]0;title\x07\x1b[2J\x9b31m\u202ecba\u2066\r\x08"
SHOWN = r"w1\u001b]0;title\u0007\u001b[2J\u009b31m\u202ecba\u2066\u000d\u0008"
FACT = EngineFaulted(worker=EVIL, instance="i1", reason=EVIL, fatal=True)
EVENT = Recorded(1, datetime(2026, 1, 1, tzinfo=UTC), FACT, "e1")
WORKER = {
    "id": EVIL, "health": "HEALTHY", "weight": 1.0, "breaker": EVIL, "in_flight": 0, "model": EVIL, "reasons": [EVIL],
    "last_canary": {"reason": EVIL}, "place": EVIL, "spare": False,
}  # fmt: skip


def clean(text: str) -> bool:
    """Return whether a text contains nothing that a terminal would interpret, except colours."""
    return io.StringIO(text).read() == _through(text)


def _through(text: str) -> str:
    out = io.StringIO()
    SafeStream(out).write(text)
    return out.getvalue()


def test_control_characters_are_shown_as_text() -> None:
    assert escape_controls(EVIL) == SHOWN
    assert escape_controls("Ünïcödé 日本語 😀 e\u0301") == "Ünïcödé 日本語 😀 e\u0301"
    assert escape_controls("a\ud800b\u2028c\ufeff") == r"a\ud800b\u2028c\ufeff"
    assert safe_values({EVIL: [EVIL, 1, None, {"a": EVIL}]}) == {SHOWN: [SHOWN, 1, None, {"a": SHOWN}]}


def test_events_and_timeline_show_names_and_reasons_as_text() -> None:
    for text in (line(EVENT), event_line(EVENT, "text"), event_line(EVENT, "json")):
        assert clean(text) and "u001b" in text
    assert json.loads(event_line(EVENT, "json"))["body"]["reason"] == EVIL, (
        "the decoded JSON has the original text"
    )


def test_status_shows_names_and_reasons_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    status = {
        "workers": [WORKER], "awaited": [], "levels": {EVIL: "LEVEL_1"},
        "journal": {"last_seq": 1, "first_seq": 1}, "spool": {}, "leader": EVIL,
        "projector": {"position": None, "lag": None}, "processes": [],
    }  # fmt: skip
    print_status(status)
    out = capsys.readouterr().out
    assert clean(out) and "u001b" in out


def test_top_shows_names_and_reasons_as_text() -> None:
    seen = FleetSeen(status={"workers": [WORKER]}, fault=EVIL)
    seen.take([EVENT])
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    console.print(picture(seen, 30))
    assert clean(cast(io.StringIO, console.file).getvalue())


def test_console_output_of_up_shows_reasons_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    warn(f"w1 ended: {EVIL}\nsecond line")
    assert capsys.readouterr().err == f"w1 ended: {SHOWN}\nsecond line\n"


def test_all_other_commands_write_through_a_safe_stream(capsys: pytest.CaptureFixture[str]) -> None:
    with safe_output():
        print(EVIL, "\t", "\x1b[31mred\x1b[0m")
    assert capsys.readouterr().out == f"{SHOWN} \t \x1b[31mred\x1b[0m\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<script>alert(1)</script>|", r"&lt;script>alert(1)&lt;/script>\|"),
        ("[x](http://evil.example) ![i](y)", r"\[x\](http\://evil.example) \!\[i\](y)"),
        ("www.evil.example", r"www\.evil.example"),
        ("a_b _c_ *d* ~e~ `f` $g$ &amp;", r"a_b \_c\_ \*d\* \~e\~ \`f\` \$g\$ &amp;amp;"),
        ("- item", r"\- item"),
        ("12. item", r"12\. item"),
        ("> quote", r"\> quote"),
        ("=== \n# Head", r"\=== \# Head"),
        ("a\x1b[2Jb", r"a\\u001b\[2Jb"),
    ],
)
def test_names_are_escaped_in_markdown(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_the_demo_shows_names_and_reasons_as_text() -> None:
    nothing = TokenDifference(0, 0, 0)
    found = DemoReport(1, 1, (), (ReportRow("kill", EVIL, 1, 0, nothing, None, None),), nothing, 0, (), 0)
    console = Console(file=io.StringIO(), width=300, force_terminal=False)
    console.print(cli.render({"workers": [WORKER]}, [EVIL], 1.0, 60.0, "3 requests"))
    console.print(table(found))
    out = cast(io.StringIO, console.file).getvalue()
    assert clean(out) and out.count("u001b") > 3


def test_plan_shows_the_planners_answer_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"model": EVIL, "workers": 1, "proposed": 2, "why": EVIL, "held": EVIL, "lost": 0, "set_by_operator": None,
             "forecast": None, "minutes_known": 1}  # fmt: skip
    answer = {
        "planner": EVIL,
        "mode": EVIL,
        "waits": EVIL,
        "at": EVIL,
        "position": 1,
        "projection_age_s": None,
    }

    class Planner(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({**answer, "models": [model]}).encode())

    with HTTPServer(("127.0.0.1", 0), Planner) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        shown = presence.announce(tmp_path, "planner", "planner", f"http://127.0.0.1:{server.server_port}")
        try:
            assert show(tmp_path, "text") == 0
        finally:
            presence.withdraw(shown)
    out = capsys.readouterr().out
    assert clean(out) and out.count("u001b") > 3


def test_errors_of_drawing_commands_are_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--data", str(tmp_path / EVIL)]) == 1
    err = capsys.readouterr().err
    assert clean(err) and "u001b" in err
