"""The flags of `holdfast trace replay`, except those for reading a trace, which all commands share."""

import argparse
from pathlib import Path

CONCURRENCY = 4096
TIMEOUT_S = 300.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add(
        "--url",
        required=True,
        metavar="URL",
        help="URL of an OpenAI-compatible server, e.g. http://127.0.0.1:8000",
    )
    add("--model", default="", help="model to use if the server has several")
    add("--key", default="", help="API key of the server (default: OPENAI_API_KEY of the environment)")
    add("--chat", action="store_true", help="use chat completions (default: completions)")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="random seed for the requests of a profile (default: 0)",
    )
    _how_much(parser)
    for flag, text in (
        ("--slo-ttft-ms", "maximum ms to the first token"),
        ("--slo-tpot-ms", "maximum ms per token after the first (mean of an answer)"),
        ("--slo-itl-ms", "maximum ms between two events of an answer"),
    ):
        add(
            flag,
            type=float,
            metavar="MS",
            help=f"SLO of a good answer: {text}; adds the goodput to the report",
        )
    add("-o", "--output", choices=("text", "json"), default="text", help="output format (default: text)")
    add("--report", type=Path, metavar="FILE", help="file to write the report to, as JSON")
    add("--plot", type=Path, metavar="PICTURE", help="chart to write, .png or .svg (needs the extra `plots`)")


def _how_much(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--speedup-ratio",
        type=float,
        default=1.0,
        metavar="X",
        help="factor on the request rate (default: 1)",
    )
    add("--max-requests", type=int, metavar="N", help="maximum number of requests (default: all)")
    add("--seconds", type=float, metavar="N", help="seconds after which no more is sent (default: no limit)")
    add(
        "--concurrency",
        type=int,
        metavar="N",
        help=f"maximum requests in flight; more are held back (default: {CONCURRENCY}, or the machine's limit)",
    )
    add(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="N",
        help=f"seconds after which a request fails (default: {TIMEOUT_S:g})",
    )
    add(
        "--scale-input",
        type=float,
        default=1.0,
        metavar="X",
        help="factor on the length of prompts; the shared part scales alike (default: 1)",
    )
    add(
        "--scale-output",
        type=float,
        default=1.0,
        metavar="X",
        help="factor on the length of answers (default: 1)",
    )
    add(
        "--max-isl",
        type=int,
        metavar="N",
        help="maximum prompt tokens; longer prompts are cut (default: no limit)",
    )
    add(
        "--max-osl",
        type=int,
        metavar="N",
        help="maximum answer tokens; longer answers are cut (default: no limit)",
    )
