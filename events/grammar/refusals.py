"""Limits of grammars, and the errors of constraints that cannot be compiled, followed or printed.

Schemas and grammars come from clients. So the parsers, the recogniser and the printers have limits, and refuse what exceeds a
limit. They never recurse without a bound, and never take exponential time.
"""

from typing import NoReturn

from events.errors import UsageError

MAX_SOURCE = 200_000  # characters of a grammar's or a schema's text
MAX_NESTING = 64  # nested groups, schemas or formats
MAX_RULES = 5_000
MAX_EXPRESSIONS = 100_000  # nodes of all rules together
MAX_REPEATS = 1_000_000  # largest bound of a counted repetition
MAX_PATTERN = 4_000  # characters of one regular expression
MAX_POSITIONS = 2_000  # alternative continuations in one state
BURST_STEPS = 400_000  # steps of a recogniser that an automaton may take at once, about half a second
STEPS_PER_CHARACTER = 20  # further steps that each character allows
MAX_PRINTED = 1_000_000  # characters of a printed grammar

CHANGE_CONSTRAINT = "change the constraint"


class GrammarRefused(UsageError):
    """A structured-output constraint is invalid, or has no grammar that Holdfast can send and continue."""

    def __init__(self, what: str, where: str, remedy: str = CHANGE_CONSTRAINT) -> None:
        super().__init__(f"{what}, at {where}: {remedy}.")
        self.what = what
        self.where = where  # a JSON pointer, a rule's name, or a line and column
        self.remedy = remedy


class TextRejected(UsageError):
    """The text is no prefix of any text of the grammar."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"The character at offset {offset} is outside the grammar.")
        self.offset = offset  # of the first character that no text of the grammar has there


def refuse(what: str, where: str, remedy: str = CHANGE_CONSTRAINT) -> NoReturn:
    """Raise GrammarRefused with what is wrong, where it is, and what the client can do."""
    raise GrammarRefused(what, where, remedy)
