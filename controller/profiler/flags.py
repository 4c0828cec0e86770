"""Flags of `holdfast profile`, and the points to measure (`Sweep`) that the flags select."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

KEY = "OPENAI_API_KEY"
NUMBER_MAX = 1_000_000
BESIDE = 3  # factor on the repeats of the "beside" measurement, which is short and a difference of times


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The points to measure: prompt lengths, batch sizes and context lengths, and how often each point is measured."""

    lengths: Sequence[int] = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    contexts: Sequence[int] = (64, 256, 1024, 4096)
    repeats: int = 3
    tokens: int = 48  # length of each answer in a batch

    def within(self, context_tokens: int | None) -> "Sweep":
        """Return the sweep without the lengths that do not fit into an engine's context of `context_tokens` tokens.

        If `context_tokens` is None, the context is unknown and nothing is left out.
        """
        if context_tokens is None:
            return self
        lengths = [n for n in self.lengths if n < context_tokens]
        contexts = [n for n in self.contexts if n + self.tokens < context_tokens]
        return replace(self, lengths=lengths, contexts=contexts)

    @property
    def steps(self) -> int:
        """Number of measurements if no point is left out."""
        return self.repeats * (len(self.lengths) + len(self.batches) * len(self.contexts) + BESIDE)


DEFAULTS = Sweep()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast profile`."""
    add = parser.add_argument
    add("url", metavar="URL", help="OpenAI-compatible server (http://…), or a worker (tcp://host:port)")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="profile to write (.npz)")
    add("--model", default="", help="model to measure if the server has several")
    add("--key", default="", help=f"API key of the server (default: {KEY} of the environment)")
    for flag, name, text in (
        ("--isl", "lengths", "prompt lengths, in tokens"),
        ("--context", "contexts", "context lengths of the answers in a batch, in tokens"),
        ("--concurrency", "batches", "batch sizes"),
    ):
        default = ",".join(map(str, getattr(DEFAULTS, name)))
        add(flag, type=_numbers, default=None, metavar="N,N…", dest=name, help=f"{text} (default: {default})")
    for name, text in (
        ("repeats", "measurements of each point"),
        ("tokens", "tokens of each answer of a batch"),
    ):
        value = getattr(DEFAULTS, name)
        add(f"--{name}", type=_count, default=value, metavar="N", help=f"{text} (default: {value})")


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 128,512,2048")
    return tuple(sorted({_count(part.strip()) for part in parts}))


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(NUMBER_MAX)) or not 1 <= int(text) <= NUMBER_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {NUMBER_MAX:,}")
    return int(text)
