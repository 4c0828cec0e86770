"""`make bench`: runs the benchmarks that need no torch, trace, peer or valgrind; prints JSON lines.

python -m benchmarks                    all of them
python -m benchmarks NAME [FLAG …]      one, as in the table of benchmarks/README.md; --help after the name shows its flags
python -m benchmarks --help             this, and the names
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from workers.engines.torch_missing import TorchMissing, require_torch

BENCHMARKS = {
    "start": "benchmarks.serving.start",
    "keeper": "benchmarks.failures.keeper",
    "worker": "benchmarks.serving.worker",
    "relay": "benchmarks.serving.relay",
    "planes": "benchmarks.serving.planes",
    "faults": "benchmarks.failures.faults",
    "journal": "benchmarks.store.journal",
    "verdict": "benchmarks.failures.verdict",
    "xid": "benchmarks.failures.xid",
    "leaving": "benchmarks.serving.leaving",
    "abuse": "benchmarks.serving.abuse",
    "fuzz": "benchmarks.attack.fuzz",
    "compromised": "benchmarks.attack.compromised",
    "store": "benchmarks.store.store",
    "fold": "benchmarks.store.fold",
    "faststream": "benchmarks.store.subscribers",
    "report": "benchmarks.store.post_mortem",
    "decided_again": "benchmarks.store.what_if_speed",
    "kv": "benchmarks.failures.kv",
    "contention": "benchmarks.failures.contention",
    "exact": "benchmarks.failures.exact",
    "group": "benchmarks.failures.group",
    "recovery": "benchmarks.failures.recovery",
    "index": "benchmarks.router.index",
    "follow": "benchmarks.router.follow",
    "choice": "benchmarks.router.choice",
    "synthesizer": "benchmarks.simulation.synthesizer",
    "replay": "benchmarks.simulation.replay",
    "spare": "benchmarks.failures.spare",
    "chaos": "benchmarks.failures.chaos",
    "walk": "benchmarks.failures.walk",
    "many": "benchmarks.serving.many",
    "upstreams": "benchmarks.serving.upstreams",
    "console": "benchmarks.serving.console",
    "scrape": "benchmarks.serving.scrape",
    "watched": "benchmarks.serving.watched",
    "near_ties": "benchmarks.corruption.near_ties",
    "evictors": "benchmarks.router.evictors",
}
WITH_TORCH = {
    "sdc": "benchmarks.corruption.sdc",
    "bitflips": "benchmarks.corruption.bitflips",
    "moves": "benchmarks.failures.moves",
    "fidelity": "benchmarks.simulation.fidelity",
}


WITH_A_TRACE = {  # of recorded chats: see benchmarks/README.md
    "routing": "benchmarks.router.routing",
    "virtual_fleet": "benchmarks.router.virtual_fleet",
    "overload": "benchmarks.overload.overload",
    "overload_fleet": "benchmarks.overload.fleet",
    "planner": "benchmarks.simulation.planner",
    "spares": "benchmarks.simulation.spares",
    "what_if": "benchmarks.simulation.what_if",
}


WITH_A_PEER = {
    "peer": "benchmarks.peers.peer",  # make peer
}


WITH_VALGRIND = {
    "request_cost": "benchmarks.serving.request_cost",
    "worker_cost": "benchmarks.serving.worker_cost",
}


WITH_A_SERVER = {
    "load": "benchmarks.serving.load",  # the load client alone
}


OF_OTHERS = {
    "attack": "benchmarks.attack.attack",  # make attack: tests and benchmarks, with their bounds
}

KNOWN = BENCHMARKS | WITH_TORCH | WITH_A_TRACE | WITH_A_PEER | WITH_VALGRIND | WITH_A_SERVER | OF_OTHERS


def main(
    arguments: Sequence[str] | None = None, become: Callable[[str, list[str]], object] = os.execv
) -> int:
    """Run the named benchmark with its flags in this process's place, or run all; return 1 if one failed, 2 for an unknown
    name."""
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments:
        name, *flags = arguments
        if name in ("-h", "--help"):
            print(f"{__doc__}\nnames: {', '.join(KNOWN)}")
            return 0
        if name not in KNOWN:
            print(f"unknown benchmark {name!r}; choose from {', '.join(KNOWN)}", file=sys.stderr)
            return 2
        if name in WITH_TORCH:
            try:
                require_torch()
            except TorchMissing as missing:
                print(f"{name}: {missing}", file=sys.stderr)
                return 1
        # exec: a Ctrl-C then reaches the benchmark alone, which has a fleet to stop, and it is not killed a quarter of a second
        # later
        become(sys.executable, [sys.executable, "-m", KNOWN[name], *flags])
        return 0
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"# {os.cpu_count()} cores, load before {load}: an idle machine gives the best and steadiest figures",
        flush=True,
    )
    failed = [
        name
        for name, module in BENCHMARKS.items()
        if subprocess.run([sys.executable, "-m", module], check=False).returncode
    ]
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
