"""Groups the flags of `up` and of the roles, for a short `--help` and a complete `--help-all`.

The flag groups of `worker` are not defined here, but by the docstrings of its settings (`workers.config.settings`).
"""

import argparse
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

FLEET: Mapping[str, Sequence[str]] = {
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
        *("--tool-call-parsers", "--reasoning-parsers"),
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
"""By group: patterns of the flags in it. A flag belongs to the first group with a matching pattern."""

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
"""By command with grouped flags: the flags that its short `--help` shows."""


class HelpAllAction(argparse.Action):
    """The action of `--help-all`, which prints all flags by group and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print argparse's own help, which lists all flags, and exit."""
        print(argparse.ArgumentParser.format_help(parser), end="")
        parser.exit(0)


def group_flags(parser: argparse.ArgumentParser) -> None:
    """Add --help-all to a parser, and move each flag without a group into the group that FLEET defines."""
    parser.usage = "%(prog)s [OPTIONS]"
    text = "show all flags by group, and exit"
    parser.add_argument("--help-all", action=HelpAllAction, nargs=0, help=text)
    # argparse exposes groups and their flags only in private attributes
    ungrouped = parser._optionals._group_actions
    known = {group.title: group for group in parser._action_groups}  # private, too
    for title, patterns in FLEET.items():
        found = [a for a in ungrouped if any(fnmatchcase(a.option_strings[0], one) for one in patterns)]
        if found:
            group = known.get(title) or parser.add_argument_group(title)
            group._group_actions.extend(found)  # private, too
            ungrouped[:] = [action for action in ungrouped if action not in found]


def short_help(parser: argparse.ArgumentParser, common: Sequence[str]) -> str:
    """Return the text of `--help`: the flags in `common`, and one line for each group of flags."""
    formatter = argparse.HelpFormatter(parser.prog)
    formatter.add_usage(parser.usage, (), ())
    formatter.add_text(parser.description)
    formatter.start_section("Common options")
    # argparse exposes a parser's flags and groups only in private attributes
    actions = {action.option_strings[0]: action for action in parser._actions}
    formatter.add_arguments([actions[flag] for flag in (*common, "-h", "--help-all")])
    formatter.end_section()
    groups = [(group.title, group._group_actions) for group in parser._action_groups[2:]]  # private, too
    lines = [f"  {title:<30}{len(flags):>3}  {flags[0].option_strings[0]} …" for title, flags in groups]
    more = f"\nGroups of all options, shown by `{parser.prog} --help-all`:\n"
    return formatter.format_help() + more + "\n".join(lines) + "\n"
