"""Goldens are shared by workers with comparable answers, wherever their model is stored."""

from events.observations import canary_key

PLACE = {
    "model": "tiny", "revision": "ab12", "engine": "transformers", "engine_version": "5.23", "dtype": "float32",
    "tp": 1, "device": "cpu",
}  # fmt: skip


def test_n23_the_place_of_the_tokenizer_does_not_matter() -> None:
    one = canary_key(tokenizer="/models/tiny", **PLACE)  # type: ignore[arg-type]
    assert one == canary_key(tokenizer="/mnt/elsewhere/tiny/", **PLACE)  # type: ignore[arg-type]


def test_n23_every_other_part_of_the_key_matters() -> None:
    one = canary_key(tokenizer="t", **PLACE)  # type: ignore[arg-type]
    for name in PLACE:
        other = {**PLACE, name: 2 if name == "tp" else "other"}
        assert canary_key(tokenizer="t", **other) != one, name  # type: ignore[arg-type]
