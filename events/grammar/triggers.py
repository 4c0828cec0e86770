"""Free text with triggers: a rule after each trigger, and excluded texts (xgrammar's TagDispatch).

The free text is an automaton (Aho and Corasick 1975). Its states are the prefixes of triggers and excluded texts. Each state
becomes a rule that ends with a reference to the rule of the next state.

As in xgrammar, a trigger inside a longer trigger is recognised only where the text does not match the longer one. An excluded
text is excluded everywhere. Free text here is valid UTF-8, but xgrammar also allows other bytes in it.
"""

from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass

from events.grammar.model import (
    EMPTY,
    NOTHING,
    CharClass,
    Expression,
    Reference,
    characters,
    choice,
    literal,
    sequence,
)
from events.grammar.refusals import refuse

MAX_TRIGGERS = 4_000  # characters of all triggers and excluded texts together


@dataclass(frozen=True, slots=True)
class TagDispatch:
    """Free text with triggers, each of which leads to an expression.

    With `loop`, free text follows the expression. Without `loop`, the text ends after the expression.
    """

    triggers: tuple[tuple[str, Expression], ...]
    excludes: tuple[str, ...] = ()
    loop: bool = True


@dataclass(slots=True)
class _TextPrefix:
    """A prefix of a trigger or of an excluded text."""

    children: dict[str, int]
    fail: int = 0  # the longest proper suffix that is a prefix, too
    dead: bool = False  # it ends in an excluded text


def add_dispatch(rules: MutableMapping[str, Expression], dispatch: TagDispatch, where: str) -> Reference:
    """Add the rules of free text with triggers to `rules`. Return a reference to the first of these rules.

    Raise GrammarRefused if a trigger or an excluded text is empty, if these texts are too long, or if an excluded text begins a
    trigger.
    """
    texts = [text for text, _ in dispatch.triggers] + list(dispatch.excludes)
    if not all(texts):
        refuse("a trigger or an excluded text is empty", where, "give it a text")
    if sum(map(len, texts)) > MAX_TRIGGERS:
        refuse(f"the triggers have more than {MAX_TRIGGERS} characters", where, "shorten them")
    for excluded in dispatch.excludes:
        if any(trigger.startswith(excluded) for trigger, _ in dispatch.triggers):
            refuse(f"the excluded text {excluded[:40]!r} begins a trigger", where, "exclude another text")
    nodes, ends = _trie(dispatch)
    moves = _link(nodes)
    prefix = f"text{len(rules)}"
    for number, node in enumerate(nodes):
        if not node.dead:
            rules[f"{prefix}-{number}"] = _rule(nodes, moves, number, ends.get(number, ()), dispatch, prefix)
    return Reference(f"{prefix}-0")


def _trie(dispatch: TagDispatch) -> tuple[list[_TextPrefix], dict[int, list[Expression]]]:
    """Return the prefixes of all triggers and excluded texts, and the expressions after each trigger.

    Each whole trigger is in the list of prefixes. Its index in that list is the key of its expressions.
    """
    nodes = [_TextPrefix({})]
    ends: dict[int, list[Expression]] = {}
    for text, body in dispatch.triggers:
        ends.setdefault(_insert(nodes, text), []).append(body)
    for text in dispatch.excludes:
        nodes[_insert(nodes, text)].dead = True
    return nodes, ends


def _insert(nodes: list[_TextPrefix], text: str) -> int:
    at = 0
    for char in text:
        if char not in nodes[at].children:
            nodes[at].children[char] = len(nodes)
            nodes.append(_TextPrefix({}))
        at = nodes[at].children[char]
    return at


def _link(nodes: list[_TextPrefix]) -> list[dict[str, int]]:
    """Set the failure links, and return the next prefix for each prefix and character.

    After a character that is not listed, the next prefix is the empty one, at index 0.
    """
    moves: list[dict[str, int]] = [dict(node.children) for node in nodes]
    left = deque(nodes[0].children.values())
    order = [0]
    while left:
        at = left.popleft()
        order.append(at)
        left.extend(nodes[at].children.values())
    for at in order:
        node = nodes[at]
        node.dead = node.dead or (at != 0 and nodes[node.fail].dead)
        fallback = moves[node.fail] if at else {}
        for char, child in node.children.items():
            nodes[child].fail = fallback.get(char, 0)
        moves[at] = {**fallback, **node.children}
    return moves


def _rule(
    nodes: list[_TextPrefix],
    moves: list[dict[str, int]],
    number: int,
    bodies: list[Expression] | tuple[()],
    dispatch: TagDispatch,
    prefix: str,
) -> Expression:
    """Return the rule of the prefix at index `number`.

    If the prefix is a whole trigger, `bodies` are the expressions to which the trigger leads. The rule then reads one of these
    expressions, or continues with a longer trigger that begins with the prefix. If `bodies` is empty, the rule
    continues the free text.
    """
    following = nodes[number].children if bodies else moves[number]
    afterwards = Reference(f"{prefix}-0") if dispatch.loop else EMPTY
    options = [sequence(body, afterwards) for body in bodies]
    if not bodies:
        other = characters(((ord(char), ord(char)) for char in following), negated=True)
        options += [EMPTY, _then(other, f"{prefix}-0")]
    targets: dict[int, list[str]] = {}
    for char, target in following.items():
        if not nodes[target].dead:
            targets.setdefault(target, []).append(char)
    for target, chars in targets.items():
        one = literal(chars[0]) if len(chars) == 1 else characters((ord(char), ord(char)) for char in chars)
        options.append(sequence(one, Reference(f"{prefix}-{target}")))
    return choice(*options)


def _then(group: CharClass, name: str) -> Expression:
    return sequence(group, Reference(name)) if group.ranges else NOTHING
