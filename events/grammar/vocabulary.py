"""The vocabulary of a tokeniser as a prefix tree over characters, for the token matcher.

Each token has a *rank*: its number in depth-first order of the tree. So the tokens of a subtree have consecutive ranks, and
one range of ranks stands for the whole subtree.

A node has the set of all characters in its subtree. In this set, all characters outside ASCII count as one. If a state stays
the same after each character of the set, that state allows the whole subtree, and the matcher does not visit the subtree.
"""

from collections.abc import Collection, Iterable, Mapping

from events.grammar.refusals import TextRejected
from events.grammar.utf8 import split

OTHERS = 1 << 128  # in a set of characters: any character outside ASCII


class TrieNode:
    """A prefix of tokens.

    `here` are the tokens that equal this prefix. The ranks of the subtree are from `first` (included) to `last` (excluded).
    """

    __slots__ = ("alphabet", "children", "first", "here", "last", "tails")

    def __init__(self) -> None:
        self.children: dict[str, TrieNode] = {}
        self.here: list[int] = []
        self.tails: list[tuple[bytes, int]] = []  # tokens that go on with an unfinished character
        self.alphabet = 0  # characters below, a set of bits
        self.first = self.last = 0  # ranks of the subtree, the last excluded


class TokenVocabulary:
    """The tokens of a tokeniser as bytes, by token id and without special tokens.

    `stop` are the ids of the tokens that end a text.
    """

    def __init__(self, tokens: Mapping[int, bytes], stop: Collection[int] = ()) -> None:
        self.tokens = dict(tokens)
        self.stop = frozenset(stop)
        self.size = max([*tokens, *self.stop], default=-1) + 1
        self.root = TrieNode()
        self.headed: list[tuple[bytes, int]] = []  # tokens that begin inside a character
        self.ranked: list[int] = []  # numbers of the tokens in the order of the tree
        for number, data in tokens.items():
            if number not in self.stop and data:
                self._insert(number, data)
        self._rank()

    def _insert(self, number: int, data: bytes) -> None:
        if 0x80 <= data[0] < 0xC0:
            self.headed.append((data, number))
            return
        try:
            text, tail = split(data)
        except TextRejected:
            return  # no UTF-8: no text contains it
        node = self.root
        for char in text:
            node = node.children.get(char) or _child(node, char)
        if tail:
            node.tails.append((tail, number))
        else:
            node.here.append(number)

    def _rank(self) -> None:
        """Number the tokens in depth-first order, and collect the characters of each subtree."""
        left: list[tuple[TrieNode, bool]] = [(self.root, False)]
        while left:
            node, done = left.pop()
            if done:
                node.last = len(self.ranked)
                for char, child in node.children.items():
                    node.alphabet |= child.alphabet | bit(char)
                continue
            node.first = len(self.ranked)
            self.ranked += node.here
            self.ranked += [number for _, number in node.tails]
            node.alphabet = OTHERS if node.tails else 0
            left.append((node, True))
            left.extend((child, False) for child in node.children.values())

    def bits(self, numbers: Iterable[int]) -> int:
        """Return a set of tokens as bits: bit n is token n."""
        found = bytearray(self.size // 8 + 1)
        for number in numbers:
            found[number >> 3] |= 1 << (number & 7)
        return int.from_bytes(found, "little")


def _child(node: TrieNode, char: str) -> TrieNode:
    found = node.children[char] = TrieNode()
    return found


def bit(char: str) -> int:
    """Return the bit that stands for a character in a set of characters.

    All characters outside ASCII have the same bit.
    """
    code = ord(char)
    return 1 << code if code < 128 else OTHERS
