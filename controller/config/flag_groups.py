"""Groups of the flags of `up` and of the roles: a short `--help`, and an ordered `--help-all`."""

import argparse
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

Groups = Mapping[str, Sequence[str]]

FLEET: Groups = {
    "Fleet": (
        *("--config", "--data", "--workers*", "--ready-timeout", "--request-plane", "--name", "--nats-url"),
        *("--fleet-key-file", "--static", "--grace-s"),
    ),
    "Engine and upstreams": (
        *("--engine", "--model", "--model-folders", "--upstream*", "--revision", "--itl-ms"),
        "--static-tokenizer",
    ),
    "API and admission": (
        *("--host", "--port", "--frontends", "--api-key-file", "--insecure", "--tls-*", "--admin-key-file"),
        *("--admin-api", "--cors-origins", "--model-aliases", "--admission-control", "--ttft-deadlines"),
        *("--park*", "--active-*", "--overload-status-code", "--retry-after-s", "--first-token-timeout*"),
        *("--early-head", "--priority-tiers", "--tier-default", "--migration-*", "--reroute-s"),
    ),
    "Router": ("--router-*",),
    "Health and canaries": ("--canary-interval", "--breaker-*", "--stall-*", "--on-corruption"),
    "Planner and spares": (
        *("--spare*", "--planner-mode", "--slo-*", "--max-batch-size", "--mode", "--every-s"),
        *("--lost-after-s", "--repeat-s", "--hook-*"),
    ),
    "Storage": ("--database-url", "--journal-*", "--accept-journal"),
    "Observability": (
        *("--observability", "--nats-monitor", "--webhook*", "--console*", "--metrics-cardinality"),
        *("--admin-host", "--admin-port", "--fleet", "--runbooks-url", "--timeout-s", "--tries-max"),
        *("--hold-s", "--wait-*", "--allow-link-local"),
    ),
    "Rehearsal (fault injection)": ("--chaos",),
}
"""Each group's flags as patterns. The first group that matches gets the flag."""

WORKER: Groups = {
    "Fleet": (
        *("--config", "--data", "--nats-url", "--fleet-key-file", "--name*", "--instance", "--count"),
        *("--stagger-delay", "--spare", "--watch-only", "--die-with-parent", "--migration-limit"),
    ),
    "Engine and upstreams": (
        *("--engine", "--engine-pid", "--model", "--revision", "--upstream*", "--ready-timeout", "--device"),
        *("--gpus", "--dtype", "--threads", "--tp", "--fatal-tokens"),
    ),
    "Request plane": ("--host", "--advertise", "--port", "--request-plane", "--connections-*"),
    "KV cache and transfer": (
        *("--kv-*", "--block-tokens", "--prefix-caching", "--host-kv-blocks", "--disk-kv-blocks"),
        *("--host-gb-per-s", "--disk-gb-per-s", "--nvlink-domain", "--rail", "--evictor"),
    ),
    "Simulated engine": (
        *("--itl-ms", "--prefill-*", "--context-tokens", "--batch-max", "--waiting-max", "--*-limit"),
        *("--adaptive-batch", "--extra-engine-args", "--engine-type", "--perf-model", "--startup-s"),
        *("--planner-profile-data", "--*speedup-ratio", "--dp-size", "--chunked-prefill", "--watermark"),
        *("--preemption", "--reasoning"),
    ),
    "Shutdown": ("--*grace-s", "--pre-stop", "--second-signal", "--graceful-shutdown"),
    "Observability": ("--admin-port",),
    "Rehearsal (fault injection)": ("--chaos",),
}

COMMON: Mapping[str, Sequence[str]] = {
    "up": (
        *("--config", "--data", "--workers", "--spares", "--engine", "--model", "--upstream", "--port"),
        *("--api-key-file", "--observability"),
    ),
    "frontend": (
        *("--config", "--data", "--name", "--nats-url", "--fleet-key-file", "--host", "--port"),
        *("--api-key-file", "--model-folders", "--admission-control"),
    ),
    "controller": ("--config", "--data", "--name", "--nats-url", "--fleet-key-file", "--admin-port"),
    "planner": ("--config", "--data", "--name", "--nats-url", "--database-url", "--mode", "--hook-url"),
    "notifier": ("--config", "--data", "--name", "--nats-url", "--webhooks", "--fleet"),
    "worker": (
        *("--config", "--data", "--name", "--nats-url", "--fleet-key-file", "--engine", "--model"),
        *("--upstream", "--port", "--count"),
    ),
}
"""The commands with groups, and the flags that their `--help` shows."""


class HelpAllAction(argparse.Action):
    """Prints every flag in its group and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the help of argparse itself."""
        print(argparse.ArgumentParser.format_help(parser), end="")
        parser.exit(0)


def group_flags(parser: argparse.ArgumentParser) -> None:
    """Add --help-all, and move the flags of a parser into their groups."""
    parser.usage = "%(prog)s [OPTIONS]"
    text = "show all flags by group, and exit"
    parser.add_argument("--help-all", action=HelpAllAction, nargs=0, help=text)
    # argparse exposes a group's flags only in private attributes, here and below
    ungrouped = parser._optionals._group_actions
    for title, patterns in (WORKER if parser.get_default("command") == "worker" else FLEET).items():
        found = [a for a in ungrouped if any(fnmatchcase(a.option_strings[0], one) for one in patterns)]
        if found:
            parser.add_argument_group(title)._group_actions.extend(found)  # as above
            ungrouped[:] = [action for action in ungrouped if action not in found]


def short_help(parser: argparse.ArgumentParser, common: Sequence[str]) -> str:
    """Return the help with the common flags, and one line for each group."""
    formatter = argparse.HelpFormatter(parser.prog)
    formatter.add_usage(parser.usage, (), ())
    formatter.add_text(parser.description)
    formatter.start_section("Common options")
    # argparse exposes a parser's flags and groups only in private attributes, here and below
    actions = {action.option_strings[0]: action for action in parser._actions}
    formatter.add_arguments([actions[flag] for flag in (*common, "-h", "--help-all")])
    formatter.end_section()
    groups = [(group.title, group._group_actions) for group in parser._action_groups[2:]]  # as above
    lines = [f"  {title:<30}{len(flags):>3}  {flags[0].option_strings[0]} …" for title, flags in groups]
    more = f"\nGroups of all options, shown by `{parser.prog} --help-all`:\n"
    return formatter.format_help() + more + "\n".join(lines) + "\n"
