"""Finds the tokens that would complete a bad word, in engines that compute their own logits.

A bad word is a sequence of tokens that must not occur in an answer. Its last token is banned wherever the tokens before it have
just been generated. The frontend sends the tokens of an answer that were generated elsewhere, so a word is also found across a
migration. As in vLLM, tokens of the prompt are no part of a word.
"""

from collections.abc import Collection, Sequence


def completing(words: Collection[Sequence[int]], tokens: Sequence[int], begin: int) -> set[int]:
    """Return the tokens that would complete one of `words`.

    `tokens` is the prompt with the tokens generated so far, which begin at the index `begin`.
    """
    length = len(tokens)
    return {
        word[-1]
        for word in words
        if len(word) <= length - begin + 1 and list(tokens[length + 1 - len(word) :]) == list(word[:-1])
    }
