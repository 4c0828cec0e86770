"""Record a sample of every kind that has none yet: `python tests/events/facts/record_samples.py`.

A sample that exists is never written again: it represents the content of old journals.
"""

import dataclasses
import json
import types
import typing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from events import codec
from events.fact import Fact
from events.subjects import subject

SAMPLES = Path(__file__).parent / "samples"
AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
KNOWN = {"worker": "w3", "instance": "0190a-w3", "frontend": "frontend-0", "model": "llama", "number": 42}


def example(name: str, hint: Any) -> Any:
    """Return a distinctive value for a field."""
    if name in KNOWN and hint in (str, int):
        return KNOWN[name]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return args[0]
    if origin in (typing.Union, types.UnionType):
        return example(name, next(arg for arg in args if arg is not type(None)))
    if origin is tuple:
        inner = args[:1] * 2 if args[-1] is Ellipsis else args
        return tuple(example(name, arg) for arg in inner)
    if origin is dict:
        return {"health": {"trials_max": 5, "dead_after": 30.0}}
    if dataclasses.is_dataclass(hint):
        return build(hint)
    simple: dict[Any, Any] = {str: f"a {name}", int: 7, float: 1.5, bool: True, datetime: AT}
    return simple[hint] if hint in simple else next(iter(hint))  # an enumeration's first


def build(kind: Any) -> Any:
    """Return an example of a dataclass, every field given."""
    hints = typing.get_type_hints(kind)
    return kind(**{field.name: example(field.name, hints[field.name]) for field in dataclasses.fields(kind)})


def main() -> None:
    SAMPLES.mkdir(exist_ok=True)
    for name, kind in codec.KINDS.items():
        path = SAMPLES / f"{name}.json"
        if path.exists():
            continue
        fact: Fact = build(kind)
        headers = codec.encode_headers(
            fact,
            id=codec.new_id(0),
            source="sample",
            source_number=1,
            said_at=AT,
            through=41,
            correlation="incident-40",
        )
        sample = {"subject": subject(fact), "headers": headers, "body": codec.to_builtins(fact)}
        path.write_text(json.dumps(sample, indent=1, ensure_ascii=False) + "\n")
        print("recorded", path.name)


if __name__ == "__main__":
    main()
