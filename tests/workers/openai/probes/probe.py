"""A probe asks a server one thing, and checks what a client relies on in the response.

A probe is a function of a `Server`. It fails with an AssertionError, and returns values that two servers with the same model
must have in common: texts, token ids, numbers of tokens, statuses.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
Probe = Callable[["Server"], object]
WITHIN_S = 240.0  # of a request, on a busy machine
TOLERANCE = 2e-3  # of a logprob
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = "def answer(question):"
SAID = [{"role": "user", "content": "What is the answer?"}]
GREEDY: Json = {"temperature": 0, "max_tokens": 6}
INCOMPLETE = "\ufffd"  # stands for the bytes of an incomplete character


@dataclass(frozen=True)
class Reply:
    """An HTTP response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        """The body, which must be JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise AssertionError(f"no JSON: {self.body[:300]!r}") from None

    @property
    def good(self) -> Any:
        """The JSON body of a successful response."""
        assert self.status == 200, f"{self.status}: {self.text[:500]}"
        return self.json

    @property
    def events(self) -> list[Json]:
        """The data of all events of a complete stream, without the last one, which says that it is complete."""
        assert self.status == 200, f"{self.status}: {self.text[:500]}"
        assert self.headers["content-type"].startswith("text/event-stream"), self.headers["content-type"]
        said = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: ")]
        assert said[-1] == "[DONE]", said[-1]
        return [json.loads(one) for one in said[:-1]]

    @property
    def named(self) -> list[tuple[str, Json]]:
        """The name and the data of each event of a stream with named events."""
        assert self.status == 200, f"{self.status}: {self.text[:500]}"
        found = []
        for block in self.text.replace("\r\n", "\n").split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
            if lines.get("data", "[DONE]") != "[DONE]":
                found.append((lines.get("event", ""), json.loads(lines["data"])))
        return found

    def refused(self, *statuses: int) -> int:
        """The status of a refusal, which must be one of these, with an error that OpenAI's clients can read."""
        assert self.status in (statuses or (400,)), f"{self.status}: {self.text[:300]}"
        error = self.json["error"]
        assert error["message"] and isinstance(error["message"], str)
        assert isinstance(error["type"], str) and "code" in error and "param" in error
        return self.status


@dataclass
class Server:
    """An OpenAI-compatible server, as a client sees it. It remembers its last responses."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)  # sent with every request
    replies: list[Reply] = field(default_factory=list)

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send a request and return the whole response."""
        sent = {"Content-Type": "application/json", **self.headers, **(headers or {})}
        request = urllib.request.Request(self.url + path, body, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
                reply = Reply(answer.status, _lower(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            reply = Reply(error.code, _lower(error.headers), error.read())
        self.replies.append(reply)
        return reply

    def get(self, path: str) -> Reply:
        return self.send("GET", path)

    def post(self, path: str, headers: Any = None, **fields: Any) -> Reply:
        """Send these fields as JSON, to the model `tiny` unless they name another one."""
        return self.send("POST", path, json.dumps({"model": "tiny"} | fields).encode(), headers)

    def complete(self, prompt: object = PROMPT, **fields: Any) -> Json:
        """Return a completion, greedy and short unless the fields say otherwise."""
        whole: Json = self.post(COMPLETIONS, prompt=prompt, **GREEDY | fields).good
        return whole

    def completed(self, prompt: object = PROMPT, **fields: Any) -> Json:
        """Return the only choice of a completion."""
        (choice,) = self.complete(prompt, **fields)["choices"]
        found: Json = choice
        return found

    def stream(self, prompt: object = PROMPT, **fields: Any) -> list[Json]:
        """Return the events of a streamed completion."""
        return self.post(COMPLETIONS, prompt=prompt, stream=True, **GREEDY | fields).events

    def chat(self, messages: Any = None, **fields: Any) -> Json:
        """Return the response to a chat, greedy and short unless the fields say otherwise."""
        whole: Json = self.post(CHATS, messages=messages or SAID, **GREEDY | fields).good
        return whole

    def message(self, messages: Any = None, **fields: Any) -> Json:
        """Return the message of the only choice of a chat."""
        (choice,) = self.chat(messages, **fields)["choices"]
        found: Json = choice["message"]
        assert found["role"] == "assistant"
        return found

    def said(self, messages: Any = None, **fields: Any) -> str:
        """Return the text of the only choice of a chat."""
        text = self.message(messages, **fields)["content"]
        assert isinstance(text, str)
        return text

    def chats(self, messages: Any = None, **fields: Any) -> list[Json]:
        """Return the events of a streamed chat."""
        return self.post(CHATS, messages=messages or SAID, stream=True, **GREEDY | fields).events

    def refuses(self, *statuses: int, path: str = COMPLETIONS, **fields: Any) -> int:
        """Return the status with which a request with these fields is refused. Without statuses, it must be 400."""
        given = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": SAID} if path == CHATS else {}
        return self.post(path, **{**given, **GREEDY, **fields}).refused(*statuses)


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def usage(whole: Json) -> tuple[int, int]:
    """Return the numbers of tokens of the prompt and of the answer."""
    used = whole["usage"]
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    return used["prompt_tokens"], used["completion_tokens"]


def text_of(events: list[Json], index: int = 0) -> str:
    """Return the text of one choice of a stream of completions."""
    return "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)


def content_of(events: list[Json], index: int = 0) -> str:
    """Return the content of one choice of a stream of chats."""
    return "".join(
        c["delta"].get("content") or "" for e in events for c in e["choices"] if c["index"] == index
    )


def finishes(events: list[Json]) -> dict[int, str]:
    """Return the finish reason of each choice of a stream. Each has exactly one, in its last event."""
    found: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            assert choice["index"] not in found, "a choice goes on after its end"
            if choice.get("finish_reason"):
                found[choice["index"]] = choice["finish_reason"]
    return found


def same(one: object, other: object) -> bool:
    """Whether two probes have returned the same.

    Numbers with a fraction may differ a little. A token of an incomplete character, and such a character at the end of a text,
    is "" for vLLM and U+FFFD for Holdfast, which shows that something is missing.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        first, second = (
            {str(name).rstrip(INCOMPLETE): value for name, value in both.items()} for both in (one, other)
        )
        return first.keys() == second.keys() and all(
            same(value, second[name]) for name, value in first.items()
        )
    if isinstance(one, str) and isinstance(other, str):
        return one.rstrip(INCOMPLETE) == other.rstrip(INCOMPLETE)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= TOLERANCE * max(1.0, abs(one))
    return one == other
