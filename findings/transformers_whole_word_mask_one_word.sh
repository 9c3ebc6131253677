#!/usr/bin/env bash
# transformers 5.24.0: with the tokenizers of DeBERTa, DeBERTa-v2 (and -v3) and RemBERT,
# whole_word_mask=True of DataCollatorForLanguageModeling takes a whole sequence for one word: it
# masks all of its tokens, or none. It tells words apart by gaps between the offsets of tokens, but
# of these tokenizers a token has the space before it in its offsets, so there are no gaps. The
# tokenizers themselves know the words (word_ids()). The share of masked tokens is as asked for, and
# with the tokenizers of BERT and RoBERTa words are masked. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 \
    tokenizers==0.23.3
cat > "$folder/program.py" <<'PROGRAM'
import string
import sys
import warnings

from tokenizers import pre_tokenizers
from transformers import (
    BertTokenizer,
    DataCollatorForLanguageModeling,
    DebertaTokenizer,
    DebertaV2Tokenizer,
    RemBertTokenizer,
    RobertaTokenizer,
)

warnings.filterwarnings("ignore")
text = "the quick brown fox jumps over the lazy dog and runs away from the angry bear"
special_tokens = ["<s>", "</s>", "<pad>", "<unk>", "<mask>"]
special_tokens += ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"]
sequences = 2000


def numbered(tokens):
    return {token: number for number, token in enumerate(special_tokens + tokens)}


# vocabularies of letters, and of one word as a whole
letters = list(string.ascii_lowercase)
word_pieces = numbered([*letters, *("##" + letter for letter in letters), "the"])
sentence_pieces = [(token, 0.0) for token in special_tokens]
sentence_pieces += [(piece, -1.0) for piece in [*letters, "\u2581", "\u2581the"]]
bytes_of_bpe = numbered(sorted(pre_tokenizers.ByteLevel.alphabet()))
tokenizers = {
    "BertTokenizer": BertTokenizer(vocab=word_pieces),
    "RobertaTokenizer": RobertaTokenizer(vocab=bytes_of_bpe, merges=[]),
    "DebertaTokenizer": DebertaTokenizer(vocab=bytes_of_bpe, merges=[]),
    "DebertaV2Tokenizer": DebertaV2Tokenizer(vocab=sentence_pieces),
    "RemBertTokenizer": RemBertTokenizer(vocab=sentence_pieces),
}
is_as_described = True
for name, tokenizer in tokenizers.items():
    encoded = tokenizer(text, return_special_tokens_mask=True, return_offsets_mapping=True)
    words = set(encoded.word_ids()) - {None}
    collator = DataCollatorForLanguageModeling(
        tokenizer, whole_word_mask=True, mlm_probability=0.15, seed=0
    )
    is_masked = collator([dict(encoded)] * sequences)["labels"] != -100
    masked_words = []
    for row in is_masked.tolist():
        kept = {word for word, masked in zip(encoded.word_ids(), row, strict=True) if not masked}
        masked_words.append(len(words - kept))
    share = is_masked.float().mean().item()
    all_words, no_words = masked_words.count(len(words)), masked_words.count(0)
    print(f"{name}: of {sequences} times {len(words)} words {share:.1%} are masked,", end=" ")
    print(f"in {all_words} sequences all, in {no_words} none")
    is_as_described &= 0.11 < share < 0.18
    if name in ("BertTokenizer", "RobertaTokenizer"):
        is_as_described &= all_words == 0 and no_words < 0.2 * sequences
    else:
        is_as_described &= all_words > 0.1 * sequences and no_words > 0.8 * sequences
sys.exit(0 if is_as_described else "whole_word_mask no longer masks all words or none")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
