"""Flags of `holdfast up` for graceful degradation under load: service objectives and request tiers.

The flags apply to every model that has no settings of its own in `HOLDFAST_CONTROLLER__POLICY__DEGRADATION__SLOS`.
"""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from controller.config.variables import PREFIX
from controller.deciders.tiers import Tiers
from controller.processes.flag_types import Options, count_to, option, positive
from events.errors import UsageError
from events.json_types import Json

POLICY = f"{PREFIX}CONTROLLER__POLICY__DEGRADATION__"
SLOS = f"{POLICY}SLOS"
COUNT_MAX = 8192
_count = count_to(COUNT_MAX)
ANY_MODEL = "*"  # a copy of the constant in the degradation decider, which is slow to import


OBJECTIVES: Mapping[str, tuple[str, Options]] = {
    "--slo-throughput": ("slo_throughput_rps", option(
        "requests per second promised per model; below this capacity the fleet degrades level by level "
        "(default: none, no degradation)", type=positive, metavar="RPS")),
    "--slo-ttft-ms": ("slo_ttft_ms", option("objective for the time to the first token, in milliseconds (default: 500)",
        type=positive, metavar="X")),
    "--slo-tpot-ms": ("slo_tpot_ms", option("objective for the time between tokens, in milliseconds (default: 30)",
        type=positive, metavar="X")),
    "--max-batch-size": ("max_batch_size", option(
        "concurrent requests per worker that capacity estimates assume at most (default: 256)", type=_count, metavar="N")),
}  # fmt: skip
"""Each flag, the objective that it sets, and its argparse options."""

TIER_FLAGS = {
    "--priority-tiers": option(
        "tiers of X-Priority, best first; the last is shed first (default: premium,standard,best_effort)",
        metavar="A,B,..."),
    "--tier-default": option("tier of requests without X-Priority (default: standard)", metavar="T"),
}  # fmt: skip


LADDER_FLAGS: Mapping[str, Options] = {flag: own for flag, (_, own) in OBJECTIVES.items()} | TIER_FLAGS


def ladder_variables(args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the flags for objectives and tiers as environment variables of the controllers.

    Raise UsageError if the flags contradict one another."""
    given = {name: _of(args, flag) for flag, (name, _) in OBJECTIVES.items() if _of(args, flag) is not None}
    found = {}
    if given:
        slos = _slos(environment)
        found[SLOS] = json.dumps({**slos, ANY_MODEL: {**slos.get(ANY_MODEL, {}), **given}})
    tiers, default = _of(args, "--priority-tiers"), _of(args, "--tier-default")
    if tiers is not None:
        found[f"{POLICY}PRIORITY_TIERS"] = tiers
    if default is not None:
        found[f"{POLICY}TIER_DEFAULT"] = default
    if found.keys() - {SLOS}:
        _check_tiers(tiers, default)
    return found


def _of(args: argparse.Namespace, flag: str) -> Any:
    return vars(args).get(flag.removeprefix("--").replace("-", "_"))


def _slos(environment: Mapping[str, str]) -> Json:
    """Return the objectives that the environment sets, by model.

    Raise UsageError if the variable is not a JSON object of models."""
    text = environment.get(SLOS) or "{}"
    try:
        slos = json.loads(text)
    except ValueError:
        slos = None
    if not isinstance(slos, dict) or not all(isinstance(slo, dict) for slo in slos.values()):
        raise UsageError(
            f'{SLOS} is not a JSON object of models, such as {{"m": {{"slo_throughput_rps": 5}}}}'
        )
    return slos


def tier_names(args: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the fleet's tiers: from --priority-tiers, else from the environment variable, else the default ones.

    Return None if the flag or the variable holds a JSON list, which is not parsed here.
    """
    text = _of(args, "--priority-tiers") or environment.get(f"{POLICY}PRIORITY_TIERS") or ""
    if text.lstrip().startswith("["):
        return None
    return tuple(text.split(",")) if text else Tiers().names


def _check_tiers(tiers: str | None, default: str | None) -> None:
    from controller.deciders.degradation import DegradationPolicy

    names = Tiers().names if tiers is None else tuple(tiers.split(","))
    try:
        DegradationPolicy(priority_tiers=names, tier_default=default or Tiers().default)
    except ValueError as error:
        given = {"--priority-tiers": tiers, "--tier-default": default}
        words = [f"{flag} {value}" for flag, value in given.items() if value is not None]
        raise UsageError(f"{' '.join(words)}: {error}") from error
