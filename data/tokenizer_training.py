"""Trains a tokenizer: a byte-level BPE with GPT-2's rules for words. Not run by itself: common.py uses it."""

import json
import os

import shards
from modules import why_not
from terminal import fail
from tokenizer import END_OF_TEXT, BpeTokenizer, byte_level, cut

SMALLEST = 257  # all bytes, and the end token
MOST_TEXT = 1 << 29  # bytes that are read; more would change little


def require():
    """Ends the script if tokenizers cannot be trained."""
    if trouble := why_not("tokenizers"):
        fail(f"--train-tokenizer needs the Python module tokenizers, which {trouble}")


def train(texts, size, folder):
    """Writes tokenizer.json and tokenizer_config.json into the folder. `texts` are bytes. The result depends on them
    alone: pairs of the same count are merged in the order of their ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Pairs that occur once would be learned by heart.
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    trained.train_from_iterator((piece.decode(errors="replace") for piece in pieces(texts)), trainer)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    model = json.loads(trained.to_str())["model"]
    if len(model["vocab"]) < size:
        fail(f"--train-tokenizer {size}: the text to train on gives only {len(model['vocab'])} tokens; give a smaller "
             "number or more text")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT,
              "clean_up_tokenization_spaces": False}
    parts = byte_level(model["vocab"], model["merges"], {END_OF_TEXT: model["vocab"][END_OF_TEXT]})
    for name, content in (("tokenizer_config.json", config), ("tokenizer.json", parts)):
        shards.write_whole(folder / name, (json.dumps(content, ensure_ascii=False) + "\n").encode())


def pieces(texts):
    """The pieces of texts, cut between words, MOST_TEXT bytes of them."""
    rules, left = BpeTokenizer("", byte_level({END_OF_TEXT: 0}, [], {}), []), MOST_TEXT
    for text in texts:
        for piece in cut(text, rules):
            if left <= 0:
                return
            yield piece
            left -= len(piece)
