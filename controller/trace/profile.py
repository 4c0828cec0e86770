"""The profile of a trace: the statistics from which any number of similar requests can be generated.

A profile contains no request of the trace. Its parts:

    shared prefixes   a tree: each prefix's length, and how many prompts continued to a longer shared prefix, ended at the
                      prefix, or continued with a part that no other prompt has (the unshared part)
    returns           how soon a prefix occurs again: the distance between consecutive prompts with the prefix. The distance
                      is counted in prompts with the parent (the next shorter shared prefix). Distances are grouped by how many
                      prompts have the parent, and how many have the prefix (both in powers of two)
    unshared parts    lengths of unshared parts in blocks, by the length of the shared prefix before them (in powers of two)
    rests             number of tokens in a prompt's last block
    outputs, arrivals output lengths; how many requests arrived at the same time, and the times between such groups

Each value is stored with the number of times that it was observed. Two things are not recorded: which time, output length and
prompt belonged to one request, and the order of the requests. docs/guides/traces.md describes all that is lost, and what a
reader of a profile can still guess about the requests.
"""

import gzip
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from math import inf
from pathlib import Path

import msgspec

from controller.trace.rows import BLOCK_TOKENS, MS_MAX, BadTrace, TraceRow, opened
from controller.trace.tree import (
    ALONE,
    END,
    ROOT,
    Core,
    Node,
    Refuse,
    Tree,
    accept,
    depth_class,
    in_order,
    size_class,
)

VERSION = 1
BYTES_MAX = 1 << 30  # largest profile that is read, uncompressed
REQUESTS_MAX = 100_000_000
MARK = '"holdfast_profile"'


class TraceProfile(msgspec.Struct):
    """The learned statistics of a trace."""

    holdfast_profile: int  # version of the format
    says: str  # origin of the profile
    block_tokens: int
    core: Core
    outputs: dict[int, int]  # output length in tokens -> number of requests
    groups: dict[int, int]  # number of requests that arrived at the same time -> how often this occurred
    gaps: list[tuple[float, int]]  # ms from one arrival time to the next, and how often this gap occurred

    @property
    def requests(self) -> int:
        """Number of requests that the profile was learned from."""
        return self.core.nodes[0].visits

    @property
    def rate(self) -> float:
        """Mean arrival rate of the trace, in requests per second; infinity if all requests arrived at the same time."""
        ms = sum(gap * count for gap, count in self.gaps)
        return self.requests * 1e3 / ms if ms else inf


def learn(
    rows: Iterable[TraceRow],
    block_tokens: int = BLOCK_TOKENS,
    *,
    says: str = "",
    refuse: Refuse | None = None,
) -> TraceProfile:
    """Learn the profile of a trace. `says` is a text that states the profile's origin.

    If a request's hash ids contradict those of earlier requests, call `refuse` with the reason and leave the request out.
    Raise BadTrace instead if `refuse` is None. Raise BadTrace for a trace without a valid request, too.
    """
    tree = Tree(block_tokens)
    outputs, groups, gaps = dict[int, int](), dict[int, int](), dict[float, int]()
    now, size = 0.0, 0
    for row in rows:
        if accept(tree, row, refuse) is None:
            continue
        outputs[row.output_length] = outputs.get(row.output_length, 0) + 1
        if size and row.timestamp != now:
            groups[size] = groups.get(size, 0) + 1
            gaps[row.timestamp - now] = gaps.get(row.timestamp - now, 0) + 1
            size = 0
        now, size = row.timestamp, size + 1
    if not size:
        raise BadTrace("there is no request to learn from")
    groups[size] = groups.get(size, 0) + 1
    core = tree.core()
    core.nodes = _ordered(core.nodes)
    return TraceProfile(
        VERSION, says, block_tokens, core, in_order(outputs), in_order(groups), sorted(gaps.items())
    )


def _ordered(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes of the prefix tree, ordered by content, because the original order would reveal single requests."""
    children: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        if place:
            children[node.parent].append(place)
    marks = [b""] * len(nodes)  # by node: a digest of the prefix and of everything below it
    for place in reversed(range(len(nodes))):
        node = nodes[place]
        first = marks[node.first] if node.first > ROOT else node.first
        below = sorted(marks[child] for child in children[place])
        told = repr((node.blocks, node.visits, node.alone, node.rests, node.lasting, first, below))
        marks[place] = blake2b(told.encode(), digest_size=16).digest()
    order = [ROOT]
    for place in order:  # the list grows in the loop
        order += sorted(children[place], key=lambda one: (-nodes[one].visits, nodes[one].blocks, marks[one]))
    moved = {place: number for number, place in enumerate(order)} | {END: END, ALONE: ALONE}
    return [
        msgspec.structs.replace(
            nodes[place], parent=moved[nodes[place].parent], first=moved[nodes[place].first]
        )
        for place in order
    ]


def save(profile: TraceProfile) -> bytes:
    """Encode a profile as the content of a compressed file. The same profile always gives the same bytes."""
    return gzip.compress(msgspec.json.encode(profile), mtime=0)


def load(path: Path) -> TraceProfile:
    """Read a saved profile. Raise BadTrace if the file is not a profile, or if the profile's counts contradict one another."""
    try:
        with opened(path) as text:
            profile = msgspec.json.decode(text.read(BYTES_MAX), type=TraceProfile)
    except msgspec.MsgspecError as error:
        raise BadTrace(f"{path} is not a profile of a trace: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise BadTrace(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if profile.holdfast_profile != VERSION:
        raise BadTrace(
            f"{path} has format {profile.holdfast_profile}, but this release reads format {VERSION}: fit the trace again"
        )
    if fault := _fault(profile):
        raise BadTrace(f"{path} is not a profile of a trace: {fault}")
    return profile


def is_profile(path: Path) -> bool:
    """Return whether a file is a saved profile, judged by its first bytes. Return False if the file cannot be read.

    Raise BadTrace for a pipe, because its content cannot be read a second time.
    """
    if path.is_fifo():
        raise BadTrace(f"{path} is a pipe, which can only be read once: write it to a file first")
    try:
        with opened(path) as text:
            return MARK in text.read(100)
    except (OSError, EOFError, zlib.error):
        return False


def _fault(profile: TraceProfile) -> str:
    """Return a description of the first contradiction in a profile; "" if it has none."""
    core = profile.core
    if profile.block_tokens < 1 or not core.nodes or core.nodes[ROOT].blocks:
        return "it has no blocks, or blocks before the first node"
    for place, node in enumerate(core.nodes):
        if place and not (0 <= node.parent < place and node.blocks >= 1):
            return f"node {place} has no parent before it, or no length"
        if node.visits < 1 or node.alone < 0:
            return f"node {place} has no visits"
    return _counts_fault(profile) or _tree_fault(core)


def _counts_fault(profile: TraceProfile) -> str:
    core, requests = profile.core, profile.requests
    tables: list[Mapping[int, int] | Mapping[float, int]] = [
        profile.outputs, profile.groups, dict(profile.gaps), core.leaf_rests, *core.first_leaves.values(),
        *core.later_leaves.values(), *(node.rests for node in core.nodes),
        *(counts for pools in core.returns.values() for counts in pools.values()),
    ]  # fmt: skip
    rests = (core.leaf_rests, *(node.rests for node in core.nodes[1:]))
    outputs, groups = sum(profile.outputs.values()), sum(profile.groups.values())
    arrived = sum(size * count for size, count in profile.groups.items())
    agree = requests == outputs == arrived and sum(count for _, count in profile.gaps) == groups - 1
    most, values = profile.block_tokens, [pair for counts in tables for pair in counts.items()]
    faults = {
        "a length, a gap or a count is below 0, or too large": any(
            not 0 <= value <= MS_MAX or count < 1 for value, count in values
        ),
        f"it has {requests:,} requests, more than {REQUESTS_MAX:,}": requests > REQUESTS_MAX,
        f"a last block has no tokens, or more than {most}": any(
            not 1 <= rest <= most for counts in rests for rest in counts
        ),
        "the numbers of outputs, arrivals and requests differ": not agree,
    }
    return next((fault for fault, holds in faults.items() if holds), "")


def _tree_fault(core: Core) -> str:
    firsts, laters, returns = Counter[int](), Counter[int](), Counter[tuple[int, int]]()
    for place, (node, depth, outcomes) in enumerate(
        zip(core.nodes, core.depths(), core.outcomes(), strict=True)
    ):
        if sum(outcomes.values()) != node.visits:
            return f"the outcomes at node {place} do not add up to its visits"
        if not outcomes.get(node.first):
            return f"the first prompt at node {place} continues to a node without visits from there"
        firsts[depth_class(depth)] += node.first == ALONE
        laters[depth_class(depth)] += node.alone - (node.first == ALONE)
        if place:
            classes = size_class(core.nodes[node.parent].visits), size_class(node.visits)
            returns[classes] += node.visits - 1
    for expected, leaves in ((firsts, core.first_leaves), (laters, core.later_leaves)):
        if {depth: sum(counts.values()) for depth, counts in leaves.items()} != +expected:
            return "the number of own-part lengths differs from the number of prompts with one"
    if sum(core.leaf_rests.values()) != (firsts + laters).total():
        return "the number of last blocks of own parts differs from the number of prompts with one"
    known = {
        (above, below): sum(counts.values())
        for above, pools in core.returns.items()
        for below, counts in pools.items()
    }
    return "" if known == +returns else "the return gaps do not match the visits"
