"""Restricts constrained answers to their grammars, in engines that compute their own logits.

The frontend sends a grammar of what may follow the request's tokens. If another worker has generated a part of the answer, the
request's tokens include that part. To continue the answer, the engine therefore needs the grammar, but no state of the other
worker.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from threading import Lock

from events.grammar.ebnf import parse_ebnf
from events.grammar.refusals import GrammarRefused, TextRejected
from events.grammar.token_matcher import TokenMatcher
from events.grammar.vocabulary import TokenVocabulary
from events.json_types import Json

MATCHERS_KEPT = 64


class GrammarFollower:
    """Tracks how far one answer has come in its grammar.

    `broken` becomes true with the first token that the grammar does not allow, such as one from a faulty device. The engine then
    ignores the grammar for the rest of the answer.
    """

    def __init__(self, matcher: TokenMatcher) -> None:
        """Start at the beginning of the grammar of `matcher`."""
        self._matcher = matcher
        self._state = matcher.start()
        self.broken = False

    def allowed(self) -> int:
        """Return the tokens that the grammar allows next, as a bit set: bit n stands for token n.

        Where the answer may end, the tokens that end it are included.
        """
        return self._matcher.allowed(self._state)

    def advance(self, token: int) -> None:
        """Record the answer's next token. If the grammar does not allow the token, set `broken`."""
        if self.broken:
            return
        try:
            self._state = self._matcher.advance(self._state, token)
        except (TextRejected, GrammarRefused):
            self.broken = True


class ConstraintMatchers:
    """Creates the token matchers for the grammars of constrained answers, and keeps the 64 used last.

    May be used from any thread.
    """

    def __init__(self, tokens: Mapping[int, bytes], stop: Collection[int]) -> None:
        """Create matchers for one vocabulary.

        `tokens` maps each token id to the token's bytes, and `stop` has the token ids that end an answer.
        """
        self._vocabulary = TokenVocabulary(tokens, stop)
        self._kept: OrderedDict[str, TokenMatcher] = OrderedDict()
        self._lock = Lock()

    def refusal(self, guided: Json) -> str | None:
        """Return why a request with this constraint cannot be served, or None if it can."""
        try:
            self.follow(guided)
        except GrammarRefused as refused:
            return f"invalid_request: {refused}"
        return None

    def follow(self, guided: Json) -> GrammarFollower:
        """Return a follower for a new answer with this constraint.

        Raise GrammarRefused if the constraint is not a grammar, or if the grammar is invalid, too large or not supported.
        """
        kinds = guided.get("structured_outputs")
        grammar = kinds.get("grammar") if isinstance(kinds, dict) else None
        if not isinstance(grammar, str):
            raise GrammarRefused(
                "this engine needs the constraint as a grammar", next(iter(guided), "guided")
            )
        with self._lock:
            found = self._kept.pop(grammar, None) or TokenMatcher(parse_ebnf(grammar), self._vocabulary)
            self._kept[grammar] = found
            if len(self._kept) > MATCHERS_KEPT:
                self._kept.popitem(last=False)
        return GrammarFollower(found)
