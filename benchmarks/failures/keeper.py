"""Measures how long after SIGKILL a process's connection ends, with a keeper and without.

    python -m benchmarks keeper [--trials 21]

For a process with a simulated worker's imports, one with torch's and transformers' (if installed), and one
with a gigabyte of heap, each with three idle threads. Medians, in ms; `freed`: until the keeper has ended too.
"""

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

PROCESS = """
import socket, sys, threading
{imports}
from workers import keeper
pid = keeper.start() if sys.argv[1] == "kept" else 0
heap = b"x" * {heap_bytes}
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
connection = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
connection.send(b"%010d" % pid)
threading.Event().wait()
"""
WORKER = "import workers.admin.server, workers.runtime, workers.engines.simulated.engine"
TORCH = "import torch, transformers; from transformers import LlamaForCausalLM"
KINDS = {"simulated worker": (WORKER, 0), "torch": (TORCH, 0), "1 GB of heap": ("", 1 << 30)}


def kill(source: str, kept: str) -> tuple[float, float]:
    """Start and kill a process; return the ms until its connection ended and until its memory was free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", source, kept, str(server.getsockname()[1])]
        process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
        connection, _ = server.accept()
    with connection:
        keeper = int(connection.recv(10))
        time.sleep(0.05)
        began = time.perf_counter()
        process.kill()
        connection.recv(1)
        ended = time.perf_counter()
    process.wait()
    while keeper and _runs(keeper):
        time.sleep(0.0005)
    return (ended - began) * 1000, (time.perf_counter() - began) * 1000


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    """Print one JSON object per kind of process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=21)
    args = parser.parse_args()
    for kind, (imports, heap_bytes) in KINDS.items():
        if kind == "torch" and importlib.util.find_spec("torch") is None:
            continue
        source = PROCESS.format(imports=imports, heap_bytes=heap_bytes)
        result: dict[str, object] = {"process": kind, "load": os.getloadavg()[0]}
        for kept in ("alone", "kept"):
            ended, freed = zip(*(kill(source, kept) for _ in range(args.trials)), strict=True)
            result[kept] = {
                "ended_ms": round(statistics.median(ended), 2),
                "ended_ms_max": round(max(ended), 2),
                "freed_ms": round(statistics.median(freed), 1),
            }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
