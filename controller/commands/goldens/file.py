"""The JSON file of `holdfast golden export` and `import`: how it is written, and what is checked when it is read."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from controller.deciders.golden import Golden
from events import codec
from events.errors import HoldfastError
from events.observations import GoldenAnswer

FORMAT = "holdfast-goldens-1"
FILE_BYTES_MAX = 64 * 1024 * 1024
GOLDEN_BYTES_MAX = 400 * 1024  # as JSON: an event has a megabyte at most
KEY_PARTS_MIN = 8  # of a canary key: see `events.observations.canary_key`

Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class BadGoldenFile(HoldfastError):
    """The file holds no goldens. Write one with `holdfast golden export -o FILE`."""


class Entry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One golden of the file."""

    canary_key: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    canary: Name
    prompt: Annotated[tuple[Token, ...], msgspec.Meta(min_length=1, max_length=65_536)]
    tokens: Annotated[tuple[Token, ...], msgspec.Meta(min_length=1, max_length=4096)]
    top_k: Annotated[tuple[tuple[tuple[Token, float], ...], ...], msgspec.Meta(max_length=4096)] = ()
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    asked: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0

    @property
    def answer(self) -> GoldenAnswer:
        """The golden as the journal has it."""
        return GoldenAnswer(
            canary=self.canary,
            prompt=self.prompt,
            tokens=self.tokens,
            top_k=self.top_k,
            tolerance=self.tolerance,
            asked=self.asked,
        )


class File(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    format: Literal["holdfast-goldens-1"]
    goldens: Annotated[list[Entry], msgspec.Meta(min_length=1, max_length=4096)]


def written(goldens: Iterable[Golden]) -> str:
    """Return the agreed goldens as the text of a file."""
    entries = [
        {
            "canary_key": one.canary_key,
            "canary": one.canary,
            "prompt": one.prompt,
            "tokens": one.tokens,
            "top_k": one.top_k,
            "tolerance": one.tolerance,
            "asked": one.asked,
        }
        for one in goldens
        if one.status == "agreed"
    ]
    return json.dumps({"format": FORMAT, "goldens": entries}) + "\n"


def read(path: Path) -> Mapping[str, tuple[GoldenAnswer, ...]]:
    """Return the goldens of a file, by canary key. Raise BadGoldenFile with the place of what is wrong."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadGoldenFile(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise BadGoldenFile(f"{path} is larger than {FILE_BYTES_MAX >> 20} MiB: export one model at a time")
    try:
        found = msgspec.json.decode(data, type=File)
    except msgspec.DecodeError as error:
        advice = "correct it, or export it again with `holdfast golden export`"
        raise BadGoldenFile(f"{path}: {_plain(str(error))}; {advice}") from error
    kept: dict[str, list[GoldenAnswer]] = {}
    for number, entry in enumerate(found.goldens):
        if why := _wrong(entry, [answer.canary for answer in kept.get(entry.canary_key, ())]):
            raise BadGoldenFile(f"{path}: goldens[{number}] ({entry.canary}): {why}")
        kept.setdefault(entry.canary_key, []).append(entry.answer)
    return {key: tuple(answers) for key, answers in kept.items()}


def _plain(text: str) -> str:
    """Return a decoder's message without its own words for a place: `$.goldens[2].tokens` is `goldens[2].tokens`."""
    return text.replace("`$.", "`").replace("`$`", "the top level")


def _wrong(entry: Entry, known: list[str]) -> str:
    """Return what no type says is wrong with a golden, and what to do; empty if nothing is."""
    if entry.canary_key.count("|") < KEY_PARTS_MIN - 1:
        return (
            f"{entry.canary_key!r} is no canary key (model|revision|tokenizer|engine|version|dtype|tpN|device); "
            "`holdfast golden list` shows those of the fleet"
        )
    if entry.canary in known:
        return "a second golden of this canary and canary key: leave one of them out"
    if entry.top_k and len(entry.top_k) != len(entry.tokens):
        return f"top_k has {len(entry.top_k)} positions, tokens {len(entry.tokens)}: they must be as many, or leave top_k out"
    for place, top in enumerate(entry.top_k):
        if not 0 < len(top) <= 64:
            return f"top_k[{place}] has {len(top)} tokens: 1 to 64 are possible"
    if entry.asked and entry.asked < len(entry.tokens):
        return f"asked is {entry.asked}, but there are {len(entry.tokens)} tokens: set it to 0, or to as many at least"
    size = len(codec.to_json(entry.answer))
    if size > GOLDEN_BYTES_MAX:
        return f"it has {size:,} bytes, {GOLDEN_BYTES_MAX:,} are possible: list fewer tokens in top_k"
    return ""


def batches(answers: Iterable[GoldenAnswer]) -> Iterable[list[dict[str, Any]]]:
    """Yield the goldens of one canary key as bodies of commands, each of which one event can hold."""
    batch: list[dict[str, Any]] = []
    size = 0
    for answer in answers:
        text = codec.to_json(answer)
        if batch and (size + len(text) > GOLDEN_BYTES_MAX or len(batch) >= 32):
            yield batch
            batch, size = [], 0
        batch.append(json.loads(text))
        size += len(text)
    if batch:
        yield batch
