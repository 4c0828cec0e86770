"""Writes, reads and validates the JSON file of `holdfast golden export` and `import`."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from controller.deciders.golden import Golden
from events import codec
from events.errors import HoldfastError
from events.observations import GoldenAnswer

FORMAT = "holdfast-goldens-1"
FILE_BYTES_MAX = 64 * 1024 * 1024
GOLDEN_BYTES_MAX = 400 * 1024  # maximum bytes of a golden as JSON, because an event has at most one megabyte
KEY_PARTS_MIN = 8  # minimum number of parts of a canary key, see `events.observations.canary_key`

Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class BadGoldenFile(HoldfastError):
    """The file is not a valid golden file. Write one with `holdfast golden export -o FILE`."""


class Entry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One golden in the file."""

    canary_key: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    canary: Name
    prompt: Annotated[tuple[Token, ...], msgspec.Meta(min_length=1, max_length=65_536)]
    tokens: Annotated[tuple[Token, ...], msgspec.Meta(min_length=1, max_length=4096)]
    top_k: Annotated[tuple[tuple[tuple[Token, float], ...], ...], msgspec.Meta(max_length=4096)] = ()
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    asked: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0

    @property
    def answer(self) -> GoldenAnswer:
        """The golden in the form in which commands and events carry it."""
        return GoldenAnswer(**{name: getattr(self, name) for name in ENTRY_FIELDS[1:]})


ENTRY_FIELDS = Entry.__struct_fields__  # the canary key, and the fields of a GoldenAnswer


class File(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a golden file."""

    format: Literal["holdfast-goldens-1"]
    goldens: Annotated[list[Entry], msgspec.Meta(min_length=1, max_length=4096)]


def written(goldens: Iterable[Golden]) -> str:
    """Return the content of a golden file. Of `goldens`, the file has those with the status "agreed"."""
    agreed = [one for one in goldens if one.status == "agreed"]
    entries = [{name: getattr(one, name) for name in ENTRY_FIELDS} for one in agreed]
    return json.dumps({"format": FORMAT, "goldens": entries}) + "\n"


def read(path: Path) -> Mapping[str, tuple[GoldenAnswer, ...]]:
    """Read and validate a golden file, and return its goldens by canary key (a key for workers with comparable answers).

    Raise BadGoldenFile if the file cannot be read or is invalid. For invalid content, the message names the position."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadGoldenFile(f"cannot read {path}: {error.strerror}") from error
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
    """Return a decoder's message with plain paths: `$.goldens[2].tokens` becomes `goldens[2].tokens`."""
    return text.replace("`$.", "`").replace("`$`", "the top level")


def _wrong(entry: Entry, known: list[str]) -> str:
    """Check a golden from a file. Return what is wrong and how to correct it, or "" if the golden is valid.

    The caller has checked the types of the fields. `known` holds the canaries of earlier goldens with the same canary key."""
    if entry.canary_key.count("|") < KEY_PARTS_MIN - 1:
        return (
            f"{entry.canary_key!r} is not a canary key (model|revision|tokenizer|engine|version|dtype|tpN|device); "
            "`holdfast golden list` shows the fleet's keys"
        )
    if entry.canary in known:
        return "duplicate golden of this canary and canary key: remove one of them"
    if entry.top_k and len(entry.top_k) != len(entry.tokens):
        return f"top_k has {len(entry.top_k)} positions, tokens {len(entry.tokens)}: make the lengths equal, or omit top_k"
    for place, top in enumerate(entry.top_k):
        if not 0 < len(top) <= 64:
            return f"top_k[{place}] has {len(top)} tokens: must have 1 to 64"
    if entry.asked and entry.asked < len(entry.tokens):
        return f"asked is {entry.asked}, but there are {len(entry.tokens)} tokens: set it to 0, or to at least that number"
    size = len(codec.to_json(entry.answer))
    if size > GOLDEN_BYTES_MAX:
        return f"{size:,} bytes exceed the limit of {GOLDEN_BYTES_MAX:,}: list fewer tokens in top_k"
    return ""


def batches(answers: Iterable[GoldenAnswer]) -> Iterable[list[dict[str, object]]]:
    """Split the goldens of one canary key into lists for the bodies of commands. Each list fits into one event."""
    batch: list[dict[str, object]] = []
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
