"""The matcher of a stock server, xgrammar, over our own vocabulary; and random cuts of its answers.

Run `python tests/events/grammar/xgrammar_server.py 10000` for the figures of the documentation: cuts, differences, times.
"""

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grammar_samples as samples
import xgrammar

from events.grammar.choices import grammar_of_choice
from events.grammar.constraint import schema_of_required_tools
from events.grammar.ebnf import parse_ebnf
from events.grammar.json_schema import grammar_of_json_object, grammar_of_json_schema
from events.grammar.model import Grammar, references
from events.grammar.printer import to_ebnf
from events.grammar.recogniser import start
from events.grammar.regex import grammar_of_regex
from events.grammar.residual import residual
from events.grammar.structural_tag import grammar_of_structural_tag
from events.grammar.token_matcher import TokenMatcher
from events.grammar.utf8 import Utf8State
from events.grammar.vocabulary import TokenVocabulary

WORDS = (
    '{"', '"}', '":', '": ', '",', ', "', "}}", "]]", '"]', "[{", "}]", "[]", "{}", "true", "false", "null", "tr", "ue",
    "name", "age", "lo", "wo", "rld", "é", "ü", "日", "本", "😀", "grün", "青", "  ", "\n  ", "0.", "00", "12", "123", "-1",
    "1e", "+5", "e-", '\\"', "\\u", "\\n", "\\\\", "abc", '"a"', '"b"', 'a":', 'b":', "T0", "-0", ":0", 'Z"', "://", ".com",
    "@x", "%2", "x1", "a-b", ' "', '"\n', 'a"', "//", '/"', '0"', '","', '["', '"a', '"b', "},", "],", "1,", "1}", "1]",
    " }", " ]", "<f", "<fun", "ction", ">", "call", "</", "tool", "get_", "x", "yes", "no", " the", " and", " cat", "country ",
)  # fmt: skip
PIECES = ("😀".encode()[:2], "😀".encode()[2:], "日".encode()[:2], b"a\xc3", b'\xa9"', b'\x98\x80",')
LONGEST = 40  # tokens of a random answer


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint of a request: what the server gets without Holdfast, and our grammar."""

    name: str
    compiled: Callable[["XgrammarServer"], Any]
    grammar: Callable[[], Grammar]
    free_text: bool = False  # xgrammar also allows bytes there that are not UTF-8

    @property
    def recursive_root(self) -> bool:
        """Whether a rule refers to the root. xgrammar forbids tokens that end a nested root and continue after it."""
        found = self.grammar()
        return any(found.root in references(body) for body in found.rules.values())


def constraints() -> list[Constraint]:
    """Return all samples."""
    found = [_of_schema(f"schema {json.dumps(one)}", one) for one in samples.SCHEMAS]
    found += [_of(f"regex {one}", "regex", one, partial(grammar_of_regex, one)) for one in samples.REGEXES]
    found += [_of(f"ebnf {one}", "grammar", one, partial(parse_ebnf, one)) for one in samples.EBNF]
    for one in samples.CHOICES:
        text = "root ::= " + " | ".join(json.dumps(option, ensure_ascii=False) for option in one)
        found.append(_of(f"choice {one}", "grammar", text, partial(grammar_of_choice, one)))
    for form in samples.FORMATS:
        tag = {"type": "structural_tag", "format": form}
        name, grammar = f"structural tag {json.dumps(form)}", partial(grammar_of_structural_tag, tag)
        found.append(_of(name, "structural_tag", json.dumps(tag), grammar, free_text=True))
    return [replace(one, name=f"{at} {one.name[:90]}") for at, one in enumerate([*found, *_tools()])]


def _of(
    name: str, kind: str, source: str, grammar: Callable[[], Grammar], free_text: bool = False
) -> Constraint:
    def compiled(server: "XgrammarServer") -> Any:
        return getattr(server.compiler, f"compile_{kind}")(source)

    return Constraint(name, compiled, grammar, free_text)


def _of_schema(name: str, schema: Any, grammar: Callable[[], Grammar] | None = None) -> Constraint:
    return _of(name, "json_schema", json.dumps(schema), grammar or partial(grammar_of_json_schema, schema))


def _tools() -> list[Constraint]:
    """Return the constraints of tool calls, with the schemas that vLLM makes of the tools, and of `json_object`."""
    parameters = samples.WEATHER
    calls = [
        {"properties": {"name": {"type": "string", "enum": [name]}, "parameters": schema}, "required": ["name", "parameters"]}
        for name, schema in (
            ("get_weather", {key: value for key, value in parameters.items() if key != "$defs"}),
            ("now", {"type": "object", "properties": {}}),
        )
    ]  # fmt: skip
    items = {"type": "object", "anyOf": calls}
    required = {"type": "array", "minItems": 1, "items": items, "$defs": parameters["$defs"]}
    return [
        _of_schema(
            "required tools",
            required,
            lambda: grammar_of_json_schema(schema_of_required_tools(samples.FUNCTIONS)),
        ),
        _of_schema("json_object", {"type": "object"}, grammar_of_json_object),
    ]


def vocabulary(whole_characters: bool) -> list[bytes]:
    """Return the tokens: all bytes, words, their joints, and pieces of characters; the last one ends a text."""
    chance = random.Random(1)
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS] + list(PIECES)
    parts = [bytes([byte]) for byte in range(32, 127)] + [word.encode() for word in WORDS]
    tokens += [b"".join(chance.choice(parts) for _ in range(chance.choice((2, 2, 3, 4)))) for _ in range(400)]
    return [one for one in dict.fromkeys(tokens) if not whole_characters or is_text(one)] + [b""]


def is_text(data: bytes) -> bool:
    """Return whether bytes are whole characters."""
    return data.decode(errors="ignore").encode() == data


class XgrammarServer:
    """A server with xgrammar: it compiles constraints, and gives the mask of allowed tokens."""

    def __init__(self, whole_characters: bool = False) -> None:
        self.tokens = vocabulary(whole_characters)
        self.end = len(self.tokens) - 1
        info = xgrammar.TokenizerInfo(
            self.tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[self.end]
        )
        self.compiler = xgrammar.GrammarCompiler(info, cache_enabled=False, max_threads=1)
        self.ours = TokenVocabulary(dict(enumerate(self.tokens[:-1])), [self.end])
        self._bits = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def mask(self, matcher: Any) -> int:
        """Return the allowed tokens as bits."""
        matcher.fill_next_token_bitmask(self._bits)
        words = self._bits[0].tolist()
        found = sum((word & 0xFFFFFFFF) << 32 * at for at, word in enumerate(words))
        return int(found & ((1 << len(self.tokens)) - 1))

    def choose(self, mask: int, chance: random.Random) -> int:
        """Return one of the allowed tokens, more often one that ends or closes something."""
        allowed = [token for token in range(len(self.tokens)) if mask >> token & 1]
        if self.end in allowed and (len(allowed) == 1 or chance.random() < 0.3):
            return self.end
        allowed = [token for token in allowed if token != self.end]
        closing = [token for token in allowed if self.tokens[token][:1] in b'"}],:']
        if closing and chance.random() < 0.5:
            return chance.choice(closing)
        whole = [token for token in allowed if is_text(self.tokens[token])]
        return chance.choice(whole if whole and chance.random() < 0.9 else allowed)


@dataclass(slots=True)
class Answer:
    """A random answer under a constraint: its tokens, and the mask before each and at the end."""

    tokens: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)


def answer(server: XgrammarServer, compiled: Any, chance: random.Random) -> Answer:
    """Return a random answer that the server's matcher allows."""
    matcher, found = xgrammar.GrammarMatcher(compiled), Answer()
    for _ in range(LONGEST):
        found.masks.append(server.mask(matcher))
        token = server.choose(found.masks[-1], chance) if found.masks[-1] else server.end
        if token == server.end:
            break
        assert matcher.accept_token(token)
        found.tokens.append(token)
    else:
        found.masks.append(server.mask(matcher))
    return found


@dataclass(slots=True)
class Cuts:
    """What random cuts found."""

    cuts: int = 0
    inside_characters: int = 0  # cuts there continue at the last whole character
    masks: int = 0
    problems: list[str] = field(default_factory=list)
    ms: dict[str, list[float]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def timed(self, what: str, began: float) -> None:
        """Add the processor time since `began`, so that a loaded machine measures the same."""
        self.ms.setdefault(what, []).append((time.thread_time() - began) * 1000)


def cut_answers(cuts: int, seed: int = 0) -> Cuts:
    """Cut random answers of all constraints at random tokens, and compare what the server allows afterwards."""
    chance, found = random.Random(seed), Cuts()
    servers = {free: XgrammarServer(whole_characters=free) for free in (False, True)}
    kinds = constraints()
    for at in range(cuts):
        one = kinds[at % len(kinds)]
        server = servers[one.free_text]
        _cut(server, one, chance, found)
    return found


def _cut(server: XgrammarServer, one: Constraint, chance: random.Random, found: Cuts) -> None:
    """Cut one random answer at one token, continue it by the residual, and compare each mask until the answer's end.

    The server has our grammar from the first token on.
    """
    began = time.thread_time()
    grammar = one.grammar()
    found.timed("convert", began)
    whole = answer(server, server.compiler.compile_grammar(to_ebnf(grammar)), chance)
    cut = chance.randint(0, len(whole.tokens))
    state = Utf8State(start(grammar))
    states = [state]
    for token in whole.tokens[:cut]:
        began = time.thread_time()
        state = state.advance(server.tokens[token])
        found.timed("advance", began)
        states.append(state)
    found.cuts += 1
    found.kinds[one.name] += 1
    found.inside_characters += bool(state.pending)
    while states[cut].pending:  # the token is generated again
        cut -= 1
    began = time.thread_time()
    printed = to_ebnf(residual(states[cut].state))
    found.timed("residual", began)
    found.sizes.append(len(printed))
    began = time.thread_time()
    compiled = server.compiler.compile_grammar(printed)
    found.timed("server's compilation", began)
    matcher = xgrammar.GrammarMatcher(compiled)
    for at in range(cut, len(whole.masks)):
        mask = server.mask(matcher)
        found.masks += 1
        if mask != whole.masks[at]:
            text = b"".join(server.tokens[token] for token in whole.tokens[:at])
            found.problems.append(f"{one.name}: cut at token {cut}, another mask after {text!r}")
            return
        if at < len(whole.tokens) and not matcher.accept_token(whole.tokens[at]):
            found.problems.append(f"{one.name}: cut at token {cut}, a token was refused")
            return


def masks(
    server: XgrammarServer, one: Constraint, chance: random.Random
) -> Iterator[tuple[str, int, int, int]]:
    """Yield along a random answer: the text, the server's mask of the constraint, that of our grammar, and our own."""
    whole, grammar = answer(server, one.compiled(server), chance), one.grammar()
    printed = xgrammar.GrammarMatcher(server.compiler.compile_grammar(to_ebnf(grammar)))
    matcher = TokenMatcher(grammar, server.ours)
    state, text = matcher.start(), b""
    for at, mask in enumerate(whole.masks):
        yield repr(text), mask, server.mask(printed), matcher.allowed(state)
        if at < len(whole.tokens):
            printed.accept_token(whole.tokens[at])
            state = matcher.advance(state, whole.tokens[at])
            text += server.tokens[whole.tokens[at]]


def report(found: Cuts) -> str:
    """Return the figures as text."""
    lines = [
        f"{found.cuts} cuts over {len(found.kinds)} constraints, {found.inside_characters} of them inside a character",
        f"{found.masks} masks compared, {len(found.problems)} cuts with a difference",
        f"printed residual: {_shares(found.sizes)} characters",
    ]
    lines += [f"{what}: {_shares(times)} ms" for what, times in found.ms.items()]
    return "\n".join([*lines, *found.problems[:10]])


def _shares(numbers: list[float] | list[int]) -> str:
    ordered = sorted(numbers)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    return f"p50 {p50:.3g}, p99 {p99:.3g}, largest {ordered[-1]:.3g}"


if __name__ == "__main__":
    result = cut_answers(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
    print(report(result))
    sys.exit(bool(result.problems))
