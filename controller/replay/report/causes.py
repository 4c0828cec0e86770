"""Causal trees of events: the parent of an event is its cause."""

from collections.abc import Sequence
from typing import NamedTuple

from controller.replay.event_lookup import cause, name
from events.fact import Recorded

NODES_MAX = 400  # nodes shown; further ones are only counted


class CauseNode(NamedTuple):
    """An event and its depth in a causal tree."""

    depth: int  # number of causes above it
    event: Recorded


class Causes(NamedTuple):
    """The causal trees, one after another, each from its root down."""

    nodes: Sequence[CauseNode]
    left_out: int  # further events that are not shown


def causes(events: Sequence[Recorded]) -> Causes:
    """Return the trees of all given events that caused another given event or were caused by one."""
    named: dict[str, Recorded] = {}
    for event in events:
        named.setdefault(name(event), event)  # a repeated event counts once
    below: dict[str, list[Recorded]] = {}
    tops: list[Recorded] = []
    for event in named.values():
        before = named.get(cause(event))
        if before is not None and before.seq < event.seq:
            below.setdefault(name(before), []).append(event)
        else:
            tops.append(event)
    nodes: list[CauseNode] = []
    waiting = [CauseNode(0, event) for event in reversed(tops) if name(event) in below]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        waiting += [CauseNode(node.depth + 1, event) for event in reversed(below.get(name(node.event), []))]
    return Causes(nodes[:NODES_MAX], max(0, len(nodes) - NODES_MAX))
