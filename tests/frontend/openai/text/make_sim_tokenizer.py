"""Generates `builtin_sim_tokenizer.json`, the tokenizer of the simulated engine. Deterministic.

    python tests/frontend/openai/text/make_sim_tokenizer.py [FILE]

Byte-level BPE with 2,048 ids: 0 <unk>, 1 <s>, 2 </s>, then the 256 bytes (3…258), then merges of ASCII letters and leading
spaces only. So any sequence of merges is whole ASCII text, and any text can still be encoded. It is trained on the word list
below and, to fill the vocabulary, on syllables; no file of the machine is used.
"""

import itertools
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from events.token_bytes import BUILTIN_FILE

VOCABULARY = 2048
SPECIALS = ("<unk>", "<s>", "</s>")

WORDS = """
the of and to in is that it for was on are as with they be at one have this from or had by but some what there
we out other were all your when up use word how said an each she which do their time if will way about many
then them would write like so these her long make thing see him two has look more day could go come did my
sound no most number who over know water than call first people may down side been now find any new work part
take get place made live where after back little only round man year came show every good me give our under
name very through just form much great think say help low line before turn cause same mean differ move right
boy old too does tell sentence set three want air well also play small end put home read hand port large spell
add even land here must big high such follow act why ask men change went light kind off need house picture try
us again animal point mother world near build self earth father head stand own page should country found
answer school grow study still learn plant cover food sun four thought let keep eye never last door between
city tree cross since hard start might story saw far sea draw left late run while press close night real life
few stop open seem together next white children begin got walk example ease paper often always music those
both mark book letter until mile river car feet care second group carry took rain eat room friend began idea
fish mountain north once base hear horse cut sure watch color face wood main enough plain girl usual young
ready above ever red list though feel talk bird soon body dog family direct pose leave song measure state
product black short class wind question happen complete ship area half rock order fire south problem piece
told knew pass farm top whole king size heard best hour better true during hundred am remember step early hold
west ground interest reach fast five sing listen six table travel less morning ten simple several vowel toward
war lay against pattern slow center love person money serve appear road map science rule govern pull cold
notice voice fall power town fine certain fly unit lead cry dark machine note wait plan figure star box noun
field rest correct able pound done beauty drive stood contain front teach week final gave green quick develop
sleep warm free minute strong special mind behind clear tail produce fact street inch lot nothing course stay
wheel full force blue object decide surface deep moon island foot yet busy test record boat common gold
possible plane age dry wonder laugh thousand ago ran check game shape yes hot miss brought heat snow bed bring
sit perhaps fill east weight language among grand ball wave drop heart present heavy dance engine position arm
wide sail material fraction forest
""".split()  # noqa: SIM905 (a list of 600 strings is harder to read)


def corpus() -> list[str]:
    """Return the training lines: the words, earlier ones more often; then some endings, then syllables."""
    lines = [f" {word}" * (2000 - 2 * place) for place, word in enumerate(WORDS)]
    lines += [f" {word}{ending}" * 20 for word in WORDS[100:500] for ending in ("s", "ing")]
    sounds = itertools.product("bcdfghklmnprstvw", "aeiou", "nrslmt")
    return lines + [f" {''.join(sound)}" * 2 for sound in sounds]


def make() -> Tokenizer:
    """Train and return the tokenizer."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIALS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY, tokenizer.get_vocab_size()
    return tokenizer


def main() -> None:
    """Write the file."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else BUILTIN_FILE
    target.write_text(make().to_str(pretty=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
