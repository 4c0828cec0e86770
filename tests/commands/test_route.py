"""`holdfast route` queries a running frontend and shows its answer."""

import asyncio
import io
import json
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from aiohttp import web

from controller.cli import main
from events.process.presence import announce

TERMS = dict.fromkeys(
    (
        "active_prefill_tokens", "device", "host", "disk", "credit", "sharers", "copy", "waiting", "active", "shared",
        "others", "requests", "lately",
    ), 0.0,
)  # fmt: skip
ANSWER = {
    "mode": "kv", "why": "the lowest cost", "model": "m", "prompt_tokens": 68, "block_tokens": 16, "required_blocks": 5,
    "known": "8 blocks of 2 of 2 ranks", "left_out": [{"worker": "w3", "why": "it is broken"}],
    "chosen": {"worker": "w2", "instance": "i", "rank": 1, "ranks": 2},
    "candidates": [
        {"worker": "w1", "rank": 0, "ranks": 1, **TERMS, "prefill": 4.25, "decode": 4.0, "weight": 1.0, "cost": 89.0},
        {"worker": "w2", "rank": 1, "ranks": 2, **TERMS, "device": 4.0, "credit": 12.0, "prefill": 4.25, "decode": 4.0,
         "weight": 1.0, "cost": 4.0},
    ],
}  # fmt: skip


class Frontend:
    """A fake frontend's admin port, in its own thread."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.asked: list[Any] = []
        self.answer, self.status = json.dumps(ANSWER), 200
        self.ends = False  # disconnect in the middle of the answer

    async def _route(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        if self.ends:
            cut = web.StreamResponse(headers={"Content-Length": "100"})
            await cut.prepare(request)
            await cut.write(b"{")
            assert request.transport is not None
            request.transport.close()
            return cut
        return web.Response(text=self.answer, status=self.status)

    def ask(self, *arguments: str) -> int:
        """Run the command while the port is open."""

        async def serve() -> int:
            app = web.Application()
            app.router.add_post("/route", self._route)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            announce(self.data, "frontend", "frontend-0", f"http://{host}:{port}")
            try:
                return await asyncio.to_thread(main, ["route", "--data", str(self.data), *arguments])
            finally:
                await runner.cleanup()

        codes: list[int] = []
        thread = Thread(target=lambda: codes.append(asyncio.run(serve())))
        thread.start()
        thread.join(30)
        return codes[0]


def test_explain_prints_the_cost_terms_as_a_table_cheapest_worker_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frontend = Frontend(tmp_path)
    assert frontend.ask("--explain", "--prompt", "once", "--router-temperature", "0.5", "--model", "m") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "w2/1 would get the request (kv, the lowest cost)"
    assert "blocks of 16: 5" in shown[1]
    assert shown[2].split() == ["worker", "prefill", "device", "credit", "decode", "weight", "cost"]
    assert [line.split()[0] for line in shown[4:6]] == ["w2/1", "w1"]
    assert shown[6] == "w3 was filtered out: it is broken"
    assert frontend.asked == [
        {"model": "m", "cache_salt": "", "router": {"temperature": "0.5"}, "prompt": "once"}
    ]


@pytest.mark.parametrize("text", ["[300, 301]", "300\n301 "])
def test_token_ids_are_read_from_a_file_or_standard_input(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend, file = Frontend(tmp_path), tmp_path / "ids"
    file.write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert frontend.ask("--tokens", str(file)) == frontend.ask("--tokens", "-", "-o", "json") == 0
    assert [asked["tokens"] for asked in frontend.asked] == [[300, 301]] * 2
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first == "w2/1 would get the request (kv, the lowest cost)"
    assert json.loads(rest) == ANSWER


def test_the_error_of_the_frontend_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frontend = Frontend(tmp_path)
    frontend.answer, frontend.status = '{"error": {"message": "the model does not exist"}}', 404
    assert frontend.ask("--prompt", "once") == 1
    assert capsys.readouterr().err == "holdfast: frontend-0: the model does not exist\n"
    frontend.answer = "<html>"
    assert frontend.ask("--prompt", "once") == 1
    assert capsys.readouterr().err == "holdfast: frontend-0: status 404\n"
    frontend.ends = True
    assert frontend.ask("--prompt", "once") == 1
    assert "does not answer: IncompleteRead(1 bytes read, 99 more expected)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "give either --prompt TEXT or --tokens FILE"),
        (["--prompt", "a", "--tokens", "-"], 2, "give either --prompt TEXT or --tokens FILE"),
        (["--tokens", "{tmp}/none"], 2, "none: No such file or directory"),
        (["--tokens", "{tmp}/words"], 2, "words is not a list of token ids: invalid literal"),
        (["--tokens", "{tmp}/empty"], 2, "empty is not a list of token ids"),
        (["--prompt", "a", "--router-mode", "best"], 2, "frontend.router.mode = 'best'"),
        (["--prompt", "a"], 1, "no frontend is running on this host; --data DIR selects another fleet"),
        (["--prompt", "a", "--frontend", "f7"], 1, "no frontend f7 is running on this host"),
    ],
)
def test_bad_input_gets_one_sentence(
    tmp_path: Path, arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words").write_text("once upon")
    (tmp_path / "empty").write_text("")
    words = [word.replace("{tmp}", str(tmp_path)) for word in arguments]
    result = main(["route", "--data", str(tmp_path), *words]), capsys.readouterr().err
    assert (result[0], says in result[1], result[1].count("\n")) == (code, True, 1), result
