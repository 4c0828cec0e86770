"""The flags of `holdfast trace replay`. Flags for reading a trace are in `controller.trace.cli`."""

import argparse
from pathlib import Path

CONCURRENCY = 4096
TIMEOUT_S = 300.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast trace replay`."""
    add = parser.add_argument
    server = "URL of an OpenAI-compatible server, e.g. http://127.0.0.1:8000"
    add("--url", required=True, metavar="URL", help=server)
    add("--model", default="", help="model to use if the server has several")
    add("--key", default="", help="API key of the server (default: OPENAI_API_KEY of the environment)")
    add("--chat", action="store_true", help="use chat completions (default: completions)")
    room = f"maximum requests in flight; more are held back (default: {CONCURRENCY}, or the machine's limit)"
    for flag, kind, default, text in (
        ("--seed", int, 0, "random seed for the requests of a profile (default: 0)"),
        ("--speedup-ratio", float, 1.0, "factor on the request rate (default: 1)"),
        ("--max-requests", int, None, "maximum number of requests (default: all)"),
        ("--seconds", float, None, "seconds after which no more is sent (default: no limit)"),
        ("--concurrency", int, None, room),
        ("--timeout", float, TIMEOUT_S, f"seconds after which a request fails (default: {TIMEOUT_S:g})"),
        ("--scale-input", float, 1.0, "factor on the length of prompts; the shared part scales alike (default: 1)"),
        ("--scale-output", float, 1.0, "factor on the length of answers (default: 1)"),
        ("--max-isl", int, None, "maximum prompt tokens; longer prompts are cut (default: no limit)"),
        ("--max-osl", int, None, "maximum answer tokens; longer answers are cut (default: no limit)"),
    ):  # fmt: skip
        add(flag, type=kind, default=default, metavar="X" if default == 1.0 else "N", help=text)
    for name, text in (
        ("ttft", "maximum ms to the first token"),
        ("tpot", "maximum ms per token after the first (mean of an answer)"),
        ("itl", "maximum ms between two events of an answer"),
    ):
        good = f"SLO of a good answer: {text}; adds the goodput to the report"
        add(f"--slo-{name}-ms", type=float, metavar="MS", help=good)
    add("-o", "--output", choices=("text", "json"), default="text", help="output format (default: text)")
    add("--report", type=Path, metavar="FILE", help="file to write the report to, as JSON")
    add("--plot", type=Path, metavar="PICTURE", help="chart to write, .png or .svg (needs the extra `plots`)")
