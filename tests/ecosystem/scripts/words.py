"""A tokenizer of a hundred words and some texts of different lengths, made on the spot: nothing comes from a hub."""

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = {"[PAD]": 0, "[UNK]": 1, "[EOS]": 2, **{f"w{i}": i + 3 for i in range(97)}}


def make_tokenizer():
    words = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]",
                                   model_input_names=["input_ids", "attention_mask"])


def make_texts(n, seed=1, low=3, high=12):
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in rng.integers(0, 97, length)) for length in rng.integers(low, high, n)]
