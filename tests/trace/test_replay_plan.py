"""The plan of a replay: equal hash ids give equal tokens at any scale, and times are the trace's."""

import json
from itertools import pairwise
from typing import Any

import pytest

from controller.trace.replay.plan import ReplayShape, plan
from controller.trace.replay.request_bodies import VOCABULARY, Form, PromptRecipe, Wording
from controller.trace.rows import TraceRow
from events.errors import UsageError

ROWS = [
    TraceRow(2000, 1300, 10, [1, 2, 3]),
    TraceRow(2000, 1536, 0, [1, 2, 4]),
    TraceRow(3500, 600, 7, [1, 9]),
    TraceRow(3500, 512, 7, [5]),
    TraceRow(9000, 700, 30, []),
    TraceRow(9000, 0, 30, []),
]


def bodies(
    shape: ReplayShape, rows: list[TraceRow] = ROWS, block: int = 512, form: Form = "token ids"
) -> list[Any]:
    wording = Wording("m", form, extra={"ignore_eos": True}, words_per_token=0.5)
    return [json.loads(wording.body(one.prompt, one.tokens)) for one in plan(rows, block, shape)]


def shared(one: list[int], two: list[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )


def test_times_count_from_the_first_request_and_are_divided() -> None:
    assert [one.at_s for one in plan(ROWS, 512, ReplayShape())] == [0, 0, 1.5, 1.5, 7, 7]
    assert [one.at_s for one in plan(ROWS, 512, ReplayShape(speedup_ratio=2))][-1] == 3.5


def test_a_body_has_all_fields_that_the_endpoint_needs() -> None:
    body = bodies(ReplayShape())[0]
    assert set(body.pop("prompt")) <= set(VOCABULARY)
    assert body == {
        "model": "m", "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        "max_tokens": 10,
    }  # fmt: skip


def test_equal_ids_are_equal_tokens_and_different_ones_are_not() -> None:
    one, two, three, four, *_ = (body["prompt"] for body in bodies(ReplayShape()))
    assert [len(prompt) for prompt in (one, two, three, four)] == [1300, 1536, 600, 512]
    assert 1024 <= shared(one, two) < 1030
    assert 512 <= shared(one, three) < 515
    assert shared(one, four) < 3
    assert bodies(ReplayShape())[0]["prompt"] == one


def test_many_ids_are_many_different_blocks() -> None:
    rows = [TraceRow(0, 16, 1, [name]) for name in range(3000)]
    assert len({tuple(body["prompt"]) for body in bodies(ReplayShape(), rows, 16)}) == 3000


def test_requests_without_ids_share_nothing_and_have_at_least_one_token() -> None:
    *_, some, none = bodies(ReplayShape())
    assert (len(some["prompt"]), len(none["prompt"])) == (700, 1)
    again = bodies(ReplayShape(), [TraceRow(0, 700, 1, []), TraceRow(0, 700, 1, [])])
    assert shared(*(body["prompt"] for body in again)) < 3


@pytest.mark.parametrize("scale", [0.02, 0.125, 0.3, 1.0, 2.0])
def test_scaled_prompts_share_as_many_blocks(scale: float) -> None:
    block = round(512 * scale)
    one, two, three, *_ = (body["prompt"] for body in bodies(ReplayShape(scale_input=scale)))
    assert len(one) == pytest.approx(1300 * scale, abs=3)
    assert 2 * block <= shared(one, two) < 2 * block + 5 and block <= shared(one, three) < block + 5
    assert all(len(body["prompt"]) >= 1 for body in bodies(ReplayShape(scale_input=1e-6)))


def test_lengths_are_cut() -> None:
    made = bodies(ReplayShape(max_isl=1100, max_osl=8, scale_output=0.5))
    assert [len(body["prompt"]) for body in made] == [1100, 1100, 600, 512, 700, 1]
    assert [body["max_tokens"] for body in made] == [5, 1, 4, 4, 8, 8]
    assert [len(body["prompt"]) for body in bodies(ReplayShape(max_isl=512))] == [512, 512, 512, 512, 512, 1]


@pytest.mark.parametrize("form", ["text", "chat"])
def test_words_are_shared_as_tokens_are(form: Form) -> None:
    def said(body: Any) -> list[str]:
        words: str = body["prompt"] if form == "text" else body["messages"][0]["content"]
        return words.split(" ")

    one, two, three, *_ = map(said, bodies(ReplayShape(), form=form))
    assert [len(words) for words in (one, two, three)] == [650, 768, 300]  # half a word per token
    same = [a == b for a, b in zip(one, two, strict=False)]
    assert all(same[:512]) and not all(same[512:520])
    assert one[:256] == three[:256] and one[256:264] != three[256:264]


def test_a_block_is_encoded_once() -> None:
    wording = Wording("m", "token ids", extra={})
    first, second = (wording.body(PromptRecipe(64, [8, 9], 32, ""), 1) for _ in range(2))
    assert first == second
    assert wording.blocks_written == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"speedup_ratio": 0},
        {"scale_input": float("nan")},
        {"scale_output": 1e9},
        {"max_isl": 0},
        {"max_osl": -1},
    ],
)
def test_invalid_shapes_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match="--" + name.replace("_", "-")):
        ReplayShape(**wrong)


@pytest.mark.parametrize("scaled", [{"scale_input": 1e6}, {"scale_output": 1e6}])
def test_lengths_beyond_memory_are_refused(scaled: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"would have .* tokens, more than 16,777,216"):
        list(plan([TraceRow(0, 100, 100, [])], 512, ReplayShape(**scaled)))  # type: ignore[arg-type]


def test_a_plan_is_lazy() -> None:
    def endless() -> Any:
        at = 0
        while True:
            at += 1
            yield TraceRow(at, 10, 1, [])

    planned = plan(endless(), 512, ReplayShape())
    times = [next(planned).at_s for _ in range(1000)]
    assert all(b > a for a, b in pairwise(times))
