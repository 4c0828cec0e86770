"""Flags of `holdfast up`, and their translation to settings of its processes."""

import argparse
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from controller import common_flags
from controller.config.flags import add_flags, as_variables, gather
from controller.config.variables import PREFIX, WORKER_PREFIX
from controller.frontend.settings import FrontendSettings, RouterSettings
from controller.journal_settings import JournalSection
from controller.planner.spares import SparePolicy, spares_for
from controller.processes.flag_types import Options, count_to, not_negative, option, port, positive
from controller.processes.ladder_flags import LADDER_FLAGS, OBJECTIVES, ladder_variables
from controller.processes.notifying.webhook_flags import FLAGS as WEBHOOK_FLAGS
from events.errors import UsageError
from events.journal.retention import JournalBounds
from workers.config.upstreams import BadUpstreams, UpstreamEntry, load_upstreams, read_upstreams

WORKERS_MAX = 10_000
PER_PROCESS_MAX = 1_000
ROUTER = "router"  # the section of a frontend's settings for which `up` has flags
OWN = (
    "migration_limit", "migration_max_seq_len", "on_corruption", "admission_control", "active_decode_blocks_threshold",
    "active_prefill_tokens_threshold", "active_prefill_tokens_threshold_frac", "overload_status_code", "ttft_deadlines",
    "park", "park_s", "console_actions", "model_folders", "admission.first_token_s", "admission.first_token_s_per_1k",
    "stream.early_head_s",
    "api_key_file", "insecure", "tls_cert", "tls_key", "admin_key_file",
    "cors_origins", "model_aliases", "tool_call_parsers", "reasoning_parsers",
    "stall.pace_factor", "stall.floor_s", "stall.ceiling_s",
)  # fields of the frontend's own settings with a flag  # fmt: skip
ENGINES = ("simulated", "transformers", "openai")
PATIENT = ("openai", "transformers")  # engines that wait for a server or load a model
PATIENT_S, READY_S = 1800.0, 60.0
PLANES = ("tcp", "nats")
AUTO = "auto"
EACH: Options = {"action": "append", "default": []}  # a repeatable flag
_count = count_to(WORKERS_MAX)


def _spares(text: str) -> int | str:
    if text == AUTO:
        return text
    if not text.isdigit() or int(text) > WORKERS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is neither {AUTO} nor a number from 0 to {WORKERS_MAX}")
    return int(text)


def spares(args: argparse.Namespace, workers: int) -> int:
    """Return the number of spares for a fleet with this number of workers."""
    if args.spares != AUTO:
        return int(args.spares)
    given = args.spare_threshold
    return spares_for(SparePolicy() if given is None else SparePolicy(spare_threshold=given), workers)


FLAGS: Mapping[str, Options] = {
    "--workers": option("number of workers (default: 3)", type=_count, default=3, metavar="N"),
    "--spares": option(
        "additional workers that stand by with the model loaded and replace failed ones; auto: as many as the failure "
        "rate requires, from --spare-threshold workers on. With --engine openai they are the last N of --upstream "
        "(default: 0)", type=_spares, default=0, metavar="N|auto"),
    "--spare-threshold": option(
        f"minimum number of workers for --spares auto to keep any (default: {SparePolicy().spare_threshold})",
        type=_count, metavar="N"),
    "--spares-on-return": option(
        "role of a lost worker that recovers: swap: it becomes the spare; release: it replaces its spare again "
        "(default: swap)", choices=("swap", "release")),
    "--workers-per-process": option(
        f"workers per process with the simulated engine, at most {PER_PROCESS_MAX} (default: 1)",
        type=_count, default=1, metavar="N"),
    "--engine": option("engine that runs the model (default: simulated)", choices=ENGINES, default="simulated"),
    "--model": option("folder of the model (weights for transformers, tokenizer for openai)", type=Path, metavar="DIR"),
    "--upstream": option("URL of an OpenAI-compatible server; one worker per server; repeatable", metavar="URL", **EACH),
    "--upstreams": option(
        "YAML file that lists OpenAI-compatible servers, with one worker for each in one process; edits take effect at once",
        type=Path, metavar="FILE"),
    "--upstream-key-file": option("file with the API key of the upstreams; once for all, or once for each --upstream",
        type=Path, metavar="FILE", **EACH),
    "--revision": option(
        "revision of the upstreams' weights, part of the canary key: workers of different revisions share no golden; "
        "once for all, or once for each --upstream", metavar="NAME", **EACH),
    "--upstream-kv-events": option(
        "endpoint at which an upstream publishes KV events, e.g. tcp://host:5557; once for each --upstream",
        metavar="ENDPOINT", **EACH),
    "--upstream-kv-replay": option("endpoint at which an upstream replays lost KV events; once for each --upstream",
        metavar="ENDPOINT", **EACH),
    "--ready-timeout": option(
        "seconds to wait for a worker to become ready "
        f"(default: {PATIENT_S:g} with openai or transformers, else {READY_S:g})", type=positive, metavar="S"),
    "--host": option("address that frontends listen on (default: 127.0.0.1)", default="127.0.0.1"),
    "--port": option("port that frontends share (default: 8000)", type=port, default=8000),
    "--frontends": option("number of frontend processes on that port (default: 1)", type=_count, default=1, metavar="N"),
    "--itl-ms": option("milliseconds per step of the simulated engine; 0: no delay", type=not_negative, metavar="X"),
    "--request-plane": option(
        "connection between frontends and workers: tcp (direct) or nats (through the broker) (default: tcp)",
        choices=PLANES, default="tcp"),
    "--planner-mode": option(
        "planner activity: off, observe (report capacity), propose (propose worker counts), or act (apply them) "
        "(default: propose)", choices=("off", "observe", "propose", "act"), default="propose"),
    "--observability": option("also start Prometheus, if it is installed, with all targets and alert rules",
        action="store_true"),
    "--nats-monitor": option(
        "port on 127.0.0.1 for the embedded broker's monitoring pages, open to all local users (default: none)",
        type=port, metavar="PORT"),
    "--canary-interval": option("seconds between canary probes of a worker (default: 30)", type=positive, metavar="S"),
    "--breaker-wait": option("seconds until the first trial of an open breaker (default: 60)", type=positive, metavar="S"),
    "--breaker-backoff": option("factor on --breaker-wait after each failed trial (default: 2)",
        type=positive, metavar="X"),
}  # fmt: skip
"""The flags of `up` itself with their argparse options, in the order of the help."""

VARIABLES: Mapping[str, str] = {
    "--host": f"{PREFIX}FRONTEND__HOST",
    "--port": f"{PREFIX}FRONTEND__PORT",
    "--request-plane": f"{PREFIX}FRONTEND__REQUEST_PLANE",
    "--planner-mode": f"{PREFIX}PLANNER__MODE",
    "--engine": f"{WORKER_PREFIX}ENGINE",
    "--model": f"{WORKER_PREFIX}MODEL",
    "--upstreams": f"{WORKER_PREFIX}UPSTREAMS",
}
"""For each flag, the environment variable that replaces its default. A process that `up` starts reads the same variable."""
SETTINGS: Mapping[str, str] = {
    "--data": "data",
    "--host": "frontend.host",
    "--port": "frontend.port",
    "--request-plane": "frontend.request_plane",
    "--engine": "worker.engine",
    "--model": "worker.model",
    "--upstreams": "worker.upstreams",
    "--itl-ms": "worker.itl_ms",
    "--canary-interval": "controller.canary.interval_s",
    "--breaker-wait": "controller.policy.breaker.wait_min",
    "--breaker-backoff": "controller.policy.breaker.backoff",
    "--spares-on-return": "controller.policy.spares.on_return",
    **dict.fromkeys(OBJECTIVES, "controller.policy.degradation.slos"),
    "--priority-tiers": "controller.policy.degradation.priority_tiers",
    "--tier-default": "controller.policy.degradation.tier_default",
    **dict.fromkeys(WEBHOOK_FLAGS, "notifier.webhooks"),
    "--chaos": "controller.chaos",
}
"""The setting of each flag that has another name than its setting. --planner-mode is missing: `off` is no mode of a planner."""
TRUE = ("1", "true", "yes", "on", "y", "t")  # the texts that pydantic reads as true

ACCEPT = "continue with the journal as it is, although this directory or its database remembers another one"
CHAOS = "allow `holdfast chaos`, for rehearsals only, never in production"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `up`: its own, and those for frontends, degradation, the router, the journal and webhooks."""
    for flag, options in FLAGS.items():
        preset = os.environ.get(VARIABLES.get(flag, "")) or None
        parser.add_argument(flag, **(options if preset is None else {**options, "default": preset}))
    add_flags(parser, FrontendSettings, only=OWN)
    common_flags.add_flags(parser, LADDER_FLAGS)
    add_router_flags(parser)
    add_flags(parser, JournalSection)
    common_flags.add_flags(parser, WEBHOOK_FLAGS)
    parser.add_argument("--accept-journal", action="store_true", help=ACCEPT)
    chaos = os.environ.get(f"{PREFIX}CONTROLLER__CHAOS", "").lower() in TRUE
    parser.add_argument("--chaos", action="store_true", default=chaos, help=CHAOS)


def listed_upstreams(file: Path | None) -> tuple[UpstreamEntry, ...]:
    """Return the entries of the file of upstreams; none without a file. Raise UsageError if the file is invalid."""
    if file is None:
        return ()
    try:
        return load_upstreams(file, read_upstreams(file))
    except BadUpstreams as error:
        raise UsageError(f"--upstreams: {error}") from error


def setting_of(action: argparse.Action) -> str | None:
    """Return the name of the setting that a flag of `up` sets, or None if the flag sets no setting."""
    if action.dest in OWN or action.dest.startswith(f"{ROUTER}."):
        return f"frontend.{action.dest}"
    return f"controller.{action.dest}" if "." in action.dest else SETTINGS.get(action.option_strings[0])


def flags_by_key(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the flags of `up` by their key in the table `up` of a configuration file."""
    # argparse exposes a parser's flags only in this private attribute
    named = {action.option_strings[0][2:].replace("-", "_"): action for action in parser._actions}
    return {key: action for key, action in named.items() if key not in ("config", "help_all", "")}


def add_router_flags(parser: argparse.ArgumentParser, only: Collection[str] = ()) -> None:
    """Add the flags of a frontend's router: all of them, or those named in `only`."""
    add_flags(
        parser, FrontendSettings, only=[f"{ROUTER}.{name}" for name in only or RouterSettings.model_fields]
    )


def controller_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return the flags for journal bounds, objectives and tiers as environment variables of the controllers.

    Raise UsageError if the flags contradict one another.
    """
    return as_variables("controller", JournalSection, vars(args)) | ladder_variables(args, os.environ)


def journal_bounds(args: argparse.Namespace) -> JournalBounds:
    """Return the journal's bounds of size and age from flags and environment. Raise BadSetting if a value is invalid."""
    of_journal = f"{PREFIX}CONTROLLER__JOURNAL__"
    environment = {name: value for name, value in os.environ.items() if name.startswith(of_journal)}
    return gather(JournalSection, "controller", vars(args), environment).journal.bounds()


def ready_timeout_s(args: argparse.Namespace) -> float:
    """Return within how many seconds the first worker must be ready."""
    return float(args.ready_timeout or (PATIENT_S if args.engine in PATIENT else READY_S))


def frontend_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return the values of the frontends' flags as environment variables."""
    own = (place for place in vars(args) if place.startswith(f"{ROUTER}.") or place in OWN)
    given = {place: getattr(args, place) for place in own}
    # in the command `route`, --model is the name of a model and not a folder
    folders = [str(args.model.resolve())] if isinstance(args.model, Path) else []
    if getattr(args, "upstreams", None) is not None:
        listed = {entry.model for entry in listed_upstreams(args.upstreams) if entry.model}
        folders += sorted(str(Path(model).resolve()) for model in listed)
    folders += [given["model_folders"]] if given.get("model_folders") else []
    given["model_folders"] = ",".join(folders) or None
    return as_variables("frontend", FrontendSettings, given)


def check_frontend_flags(args: argparse.Namespace) -> None:
    """Raise BadSetting if a flag has a value that frontends would reject."""
    gather(FrontendSettings, "frontend", {}, frontend_variables(args))
