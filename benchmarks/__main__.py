"""`make bench`: run every benchmark that needs neither torch, a trace, a peer nor valgrind, one by one; print their JSON lines.

python -m benchmarks [NAME …]     names as in the table of benchmarks/README.md
"""

import os
import subprocess
import sys

BENCHMARKS = {
    "start": ["benchmarks.start"],
    "keeper": ["benchmarks.keeper"],
    "worker": ["benchmarks.worker"],
    "relay": ["benchmarks.relay"],
    "planes": ["benchmarks.planes"],
    "faults": ["benchmarks.faults"],
    "journal": ["benchmarks.journal"],
    "verdict": ["benchmarks.verdict"],
    "xid": ["benchmarks.xid"],
    "leaving": ["benchmarks.leaving"],
    "store": ["benchmarks.store"],
    "fold": ["benchmarks.fold"],
    "kv": ["benchmarks.kv"],
    "contention": ["benchmarks.contention"],
    "exact": ["benchmarks.exact"],
    "group": ["benchmarks.group"],
    "recovery": ["benchmarks.recovery"],
    "index": ["benchmarks.index"],
    "follow": ["benchmarks.follow"],
    "choice": ["benchmarks.choice"],
    "synthesizer": ["benchmarks.synthesizer"],
    "replay": ["benchmarks.replay"],
    "chaos": ["benchmarks.chaos"],
    "many": ["benchmarks.many"],
    "evictors": ["benchmarks.evictors"],
}
WITH_TORCH = {
    "sdc": ["benchmarks.sdc"],
    "bitflips": ["benchmarks.bitflips"],
    "moves": ["benchmarks.moves"],
    "fidelity": ["benchmarks.fidelity"],
}


WITH_A_TRACE = {  # of real chats: see benchmarks/README.md
    "routing": ["benchmarks.routing"],
    "virtual_fleet": ["benchmarks.virtual_fleet"],
}


WITH_A_PEER = {
    "peer": ["benchmarks.peer"],  # make peer
}


WITH_VALGRIND = {
    "request_cost": ["benchmarks.request_cost"],
}


def main() -> int:
    """Run the named benchmarks, or all; return 1 if one failed."""
    known = BENCHMARKS | WITH_TORCH | WITH_A_TRACE | WITH_A_PEER | WITH_VALGRIND
    names = sys.argv[1:] or list(BENCHMARKS)
    if unknown := [name for name in names if name not in known]:
        print(f"there is no benchmark {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"# {os.cpu_count()} cores, load before {load}: idle machines give the best and the steadiest figures",
        flush=True,
    )
    failed = [n for n in names if subprocess.run([sys.executable, "-m", *known[n]], check=False).returncode]
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
