"""All probes by their names, and how two servers answer them.

python tests/workers/openai/probes/every.py DIRECT THROUGH     prints the probes that differ, given the URLs of a server and
                                                               of a fleet in front of it
"""

import inspect
import sys
from pathlib import Path
from types import ModuleType

import chats
import completions
import constrained
import errors
import messages
import operations
import responses
import streams
from probe import Probe, Server, same

GENERATING = (completions, streams, chats, constrained, errors, operations, messages, responses)


def probes_of(*modules: ModuleType) -> dict[str, Probe]:
    """Return the probes of these modules by their names: all public functions that they define."""
    return {
        f"{module.__name__}-{name}": one
        for module in modules
        for name, one in inspect.getmembers(module, inspect.isfunction)
        if one.__module__ == module.__name__ and not name.startswith("_")
    }


def outcome(probe: Probe, server: Server) -> tuple[object, str]:
    """Return what a probe returns for a server, and why it failed, or "" if it passed."""
    try:
        return probe(server), ""
    except (AssertionError, LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        return None, f"{type(error).__name__}: {error}"


def compared(probe: Probe, direct: Server, through: Server) -> tuple[str, str]:
    """Return why a probe fails directly, and why it fails through a fleet or returns something else there."""
    wanted, failed = outcome(probe, direct)
    if failed:
        return failed, ""
    found, why = outcome(probe, through)
    if not why and not same(wanted, found):
        why = f"returns {found!r} instead of {wanted!r}"
    return "", why


def main(direct: str, through: str, *wanted: str) -> None:
    """Print the probes that fail directly, and those that pass directly and fail through a fleet."""
    passed = good = 0
    for name, probe in probes_of(*GENERATING).items():
        if wanted and not any(part in name for part in wanted):
            continue
        failed, why = compared(probe, Server(direct), Server(through))
        passed += not failed
        good += not failed and not why
        if failed or why:
            print(f"{'DIRECT ' if failed else 'THROUGH'} {name}: {failed or why}"[:700], flush=True)
    print(f"{passed} pass directly, {good} of them pass through the fleet")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
