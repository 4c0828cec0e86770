"""The structure of a body is counted in small, bounded steps, before anything is decoded."""

import json
import random
from typing import Any

import pytest

from controller.frontend.openai.intake import SLICE_BYTES, BodyScan
from controller.frontend.settings import AdmissionSettings


def limits_of(names: int, lists: int, texts: int, values: int) -> AdmissionSettings:
    """Return limits without validation: settings may not be this low."""
    return AdmissionSettings.model_construct(
        body_names_max=names, body_lists_max=lists, body_texts_max=texts, body_values_max=values
    )


LIMITS = limits_of(100, 50, 200, 1000)
NAMES = b'{"model":"m"' + b"".join(b',"a%d":1' % n for n in range(1_000_000)) + b"}"


def fed(body: bytes, limits: AdmissionSettings, dice: random.Random | None = None) -> tuple[str, BodyScan]:
    """Feed a body in slices of the usual size, or of random sizes, until it is refused."""
    scan, at = BodyScan(limits), 0
    while at < len(body):
        size = SLICE_BYTES if dice is None else dice.randint(1, 40)
        if excess := scan.feed(body[at : at + size]):
            return excess, scan
        at += size
    return "", scan


def counts(value: Any) -> tuple[int, int]:
    """Return the number of names, and of lists and objects, in a value."""
    if isinstance(value, dict):
        inner = [counts(one) for one in value.values()]
        return len(value) + sum(n for n, _ in inner), 1 + sum(m for _, m in inner)
    if isinstance(value, list):
        inner = [counts(one) for one in value]
        return sum(n for n, _ in inner), 1 + sum(m for _, m in inner)
    return 0, 0


def made(dice: random.Random, depth: int = 0) -> Any:
    """Return a random JSON value, with strings that look like structure."""
    kind = dice.randrange(5 if depth < 4 else 3)
    text = "".join(dice.choice('a"\\{}[],:é\n') for _ in range(dice.randrange(6)))
    if kind == 3:
        return [made(dice, depth + 1) for _ in range(dice.randrange(4))]
    if kind == 4:
        return {f"{n}{text}": made(dice, depth + 1) for n in range(dice.randrange(4))}
    return (text, dice.randrange(1000), None)[kind]


def test_contents_of_strings_are_not_counted_wherever_a_body_is_cut() -> None:
    """The counts of 1,000 random bodies, cut at random places, equal those of the decoded values."""
    dice = random.Random(18)
    limits = limits_of(10**6, 10**6, 10**6, 10**6)
    for _ in range(1000):
        value = [made(dice) for _ in range(3)]
        body = json.dumps(value, ensure_ascii=dice.random() < 0.5).encode()
        excess, scan = fed(body, limits, dice)
        assert (excess, scan.names, scan.nested) == ("", *counts(value)), body


@pytest.mark.parametrize(
    ("body", "excess"),
    [
        (b"{" + b'"a":1,' * 101, "100 names"),
        (b"[" * 51, "50 lists and objects"),
        (b"[" + b'"",' * 201, "200 texts and names"),
        (b"[" + b"1," * 1001, "1000 values"),
    ],
)
def test_each_limit_is_reported_by_its_name(body: bytes, excess: str) -> None:
    assert fed(body, LIMITS)[0] == excess


def test_a_million_unknown_names_are_refused_after_a_twelfth_of_the_body() -> None:
    """The reported body of 11 MB used to be decoded completely, which delayed all other clients for seconds."""
    excess, scan = fed(NAMES, AdmissionSettings())
    assert excess == "65536 names" and scan.size < len(NAMES) / 12


def test_10000_messages_of_one_part_each_are_within_the_limits() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": 'a "quoted" word'}]}
    excess, scan = fed(
        json.dumps({"model": "m", "messages": [message] * 10_000}).encode(), AdmissionSettings()
    )
    assert not excess and not scan.cheap
