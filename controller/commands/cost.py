"""`holdfast cost`: compares KV transfer with re-prefill, and estimates failures and spares."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

from controller.migration.cost import KvShape, MigrationTarget, MovingPolicy, estimate
from controller.migration.links import Lane, LinkName, LinkSpec, LinkTable
from controller.planner.spares import spares_needed
from controller.simulator.rates import HOURS_PER_YEAR, PRESETS, mtbf_hours
from events.errors import UsageError
from events.observations import Profile

Figures = dict[str, Any]  # estimates, as plain JSON types

TOKENS = (256, 1024, 4096, 16_384, 65_536, 131_072)  # default sequence lengths
GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast cost`."""
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag, (kind, default, metavar, text) in flags.items():
            text_with_default = f"{text} (default: {_shown(default)})"
            group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text_with_default)
    text = f"measured rate of a link in GB/s, one direction; NAME is one of {', '.join(get_args(LinkName))}"
    parser.add_argument("--link", type=_link, action="append", default=[], metavar="NAME=GBPS", help=text)
    text = "field study of failure rates (default: seed-3pct)"
    parser.add_argument("--rates", choices=sorted(PRESETS), default="seed-3pct", help=text)
    text = "output format (default: text)"
    parser.add_argument("-o", dest="output", choices=("text", "json"), default="text", help=text)


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return "from --rates" if default is None else f"{default:g}"


def run(args: argparse.Namespace) -> int:
    """Print the costs of moving requests and of GPU failures, and return exit code 0. Raise UsageError for invalid arguments."""
    try:
        found = {"move": moving(args), "fleet": failing(args)}
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(json.dumps(found, indent=1) if args.output == "json" else "\n".join(lines(found)))
    return 0


def moving(args: argparse.Namespace) -> Figures:
    """Return the milliseconds that KV transfer and re-prefill take, per sequence length and link.

    The result also has each link's crossover: the sequence length in tokens from which transfer is faster. Raise ValueError
    if the arguments contradict each other or are out of range."""
    kv = KvShape(
        layers=args.layers, kv_heads=args.kv_heads, head_size=args.head_size, bytes_per_element=args.kv_bytes, tp=args.tp
    )  # fmt: skip
    measured: Figures = {name: LinkSpec(bytes_per_s=rate * 1e9) for name, rate in args.link}
    policy = MovingPolicy(links=replace(LinkTable(), **measured), setup_s=args.setup_ms / 1000)
    profile = Profile(
        kv_blocks=0, block_tokens=16, max_batch=1, prefill_tokens_per_s=args.prefill_tokens_per_s, tpot_ms=()
    )
    links = []
    for link in get_args(LinkName):
        # all shards share the host's TCP link
        lanes = (Lane(link, args.tp if link == "tcp" else 1),) * args.tp
        target = MigrationTarget(name=link, profile=profile, free_blocks=0, lanes=lanes)
        costs = [estimate(policy, kv, target, tokens) for tokens in args.tokens]
        links.append({
            "link": link, "gb_per_s": policy.links.spec(link).rate / 1e9,
            "transfer_ms": [one.transfer_time_ms for one in costs], "recommended": [one.recommended for one in costs],
            "crossover_tokens": costs[0].crossover_tokens,
        })  # fmt: skip
    least = kv.shard_bytes_per_token * args.prefill_tokens_per_s
    return {
        "tokens": [*args.tokens],
        "kv_bytes_per_token": kv.shard_bytes_per_token * kv.tp,
        "bytes": [-(-tokens // 16) * 16 * kv.shard_bytes_per_token * kv.tp for tokens in args.tokens],
        "reprefill_ms": [1000 * tokens / args.prefill_tokens_per_s for tokens in args.tokens],
        "transfer_wins_above_gb_per_s": least / 1e9,
        "links": links,
    }


def failing(args: argparse.Namespace) -> Figures:
    """Return how often a GPU of the fleet fails, the capacity that a failure costs, and the spares needed.

    Raise ValueError if the fleet has fewer GPUs than one tensor-parallel group."""
    rates = PRESETS[args.rates]
    afr = args.afr if args.afr is not None else rates.afr
    mttr_hours = args.mttr_hours if args.mttr_hours is not None else rates.mttr_hours
    groups = args.gpus // args.tp
    if not groups:
        raise ValueError(f"--gpus {args.gpus} is smaller than one group of --tp {args.tp}")
    per_day = args.gpus * afr / HOURS_PER_YEAR * 24
    return {
        "gpus": args.gpus,
        "groups": groups,
        "source": rates.source if args.afr is None else "--afr",
        "afr": afr,
        "mtbf_hours": mtbf_hours(args.gpus, afr),
        "failures_per_day": per_day,
        "mttr_hours": mttr_hours,
        "gpus_per_failure": args.tp,
        "capacity_per_failure": 1 / groups,
        "gpu_hours_lost_per_day": per_day * args.tp * mttr_hours,
        "spare_groups": spares_needed(groups, per_day / groups, mttr_hours / 24, args.target),
        "target": args.target,
        "cold_start_s": cold_start_s(args.weights_gb, args.storage_gbps, args.start_s),
    }


def cold_start_s(weights_gb: float, storage_gbps: float, start_s: float) -> float:
    """Return the seconds until a new tensor-parallel group serves: the time to read its weights, plus `start_s` for other steps.

    `weights_gb` is in GB, and `storage_gbps` in GB/s."""
    return weights_gb / storage_gbps + start_s


def lines(found: Figures) -> list[str]:
    """Format the results of `moving` and `failing` as lines of text."""
    move, fleet = found["move"], found["fleet"]
    head = "".join(f"{tokens:>11,}" for tokens in move["tokens"])
    output = [
        f"Milliseconds to move one request ({move['kv_bytes_per_token'] / 1024:,.0f} KiB of KV cache per token)",
        "",
        f"{'tokens':24}{head}{'crossover':>11}",
        f"{'GiB':24}" + "".join(f"{size / GIB:>11.3f}" for size in move["bytes"]),
        f"{'re-prefill':24}" + "".join(f"{took:>11,.1f}" for took in move["reprefill_ms"]),
    ]
    for one in move["links"]:
        cells = "".join(f"{took:>11,.1f}" for took in one["transfer_ms"])
        crossover = "none" if one["crossover_tokens"] is None else f"{one['crossover_tokens']:,}"
        output.append(f"{one['link']:13} {one['gb_per_s']:5.1f} GB/s".ljust(24) + f"{cells}{crossover:>11}")
    gpus = "1 GPU" if fleet["gpus_per_failure"] == 1 else f"{fleet['gpus_per_failure']:,} GPUs"
    output += [
        "",
        f"Above {move['transfer_wins_above_gb_per_s']:.3f} GB/s per shard, transfer beats re-prefill from the crossover on.",
        "",
        f"{fleet['gpus']:,} GPUs in {fleet['groups']:,} groups, {100 * fleet['afr']:.1f} % of the GPUs fail per year",
        f"  source: {fleet['source']}",
        f"  a failure every {fleet['mtbf_hours']:,.1f} h ({fleet['failures_per_day']:.3f} per day), for any group size",
        f"  blast radius: {gpus}, {100 * fleet['capacity_per_failure']:.2f} % of the capacity, for "
        f"{fleet['mttr_hours']:,.1f} h; {fleet['gpu_hours_lost_per_day']:,.1f} GPU-hours lost per day",
        f"  spare groups for {100 * fleet['target']:g} % of the time: {fleet['spare_groups']:,}",
        f"  a new group serves after {fleet['cold_start_s']:,.0f} s, a spare within a second",
    ]
    return output


def _number(text: str) -> float:
    return _below(1e12, text, "a number above 0")


def _below(limit: float, text: str, what: str) -> float:
    """Parse a number above 0 and below `limit`. Raise ArgumentTypeError for any other text.

    `what` describes the expected number in the error's message.
    """
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < limit:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return found


def _whole(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 10000000")
    return int(text)


def _share(text: str) -> float:
    return _below(1, text, "a share between 0 and 1, such as 0.99")


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(_whole(part) for part in text.split(","))


def _link(text: str) -> tuple[str, float]:
    name, given, rate = text.partition("=")
    if not given:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=GBPS, such as tcp=2.1")
    if name not in get_args(LinkName):
        raise argparse.ArgumentTypeError(f"{name!r} is not a link: {', '.join(get_args(LinkName))}")
    return name, _number(rate)


FLAGS: Mapping[str, Mapping[str, tuple[Callable[[str], Any], Any, str, str]]] = {
    "model": {
        "--layers": (_whole, 80, "N", "number of layers"),
        "--kv-heads": (_whole, 8, "N", "number of KV heads"),
        "--head-size": (_whole, 128, "N", "size of one head"),
        "--kv-bytes": (_whole, 2, "N", "bytes per KV element: 2 for fp16 and bf16, 1 for fp8"),
        "--tp": (_whole, 8, "N", "tensor-parallel shards per group"),
        "--prefill-tokens-per-s": (_number, 5000.0, "R", "prefill rate of one group in tokens per second"),
    },
    "move": {
        "--tokens": (_lengths, TOKENS, "N,…", "comma-separated sequence lengths in tokens"),
        "--setup-ms": (_number, 5.0, "MS", "milliseconds until the first byte of a transfer"),
    },
    "fleet": {
        "--gpus": (_whole, 1024, "N", "number of serving GPUs"),
        "--afr": (_number, None, "SHARE", "annual failure rate of one GPU; 0.03 is 3 %%"),
        "--mttr-hours": (_number, None, "H", "mean hours until a failed group serves again"),
        "--target": (_share, 0.99, "SHARE", "share of time in which the spares must suffice"),
        "--weights-gb": (_number, 140.0, "GB", "size of the weights in GB"),
        "--storage-gbps": (_number, 2.0, "GBPS", "rate in GB/s at which a group reads its weights"),
        "--start-s": (
            _number,
            60.0,
            "S",
            "measured start time of a group in seconds, without reading weights",
        ),
    },
}
"""Type, default, metavar and help of each flag, by group."""
