"""The text with which a model continues a prompt if each token is the likeliest, computed by PyTorch in fp64."""

import numpy as np
import torch

import reference_model

PROMPT = [3, 17, 4]
TOKENS = 40


def contexts(prompt, count, T):
    """The beginning of the context for each of `count` tokens. If the context is full, only its later half is kept."""
    begin = max(len(prompt) - T, 0)
    for length in range(len(prompt), len(prompt) + count):
        if length - begin > T:
            begin = length - max(T // 2, 1)
        yield begin


def most_likely(weights, sizes, choose=lambda context: (context, -1), prompt=PROMPT):
    """(tokens after the prompt, the smallest lead of a token over the second). `choose` gives a context's inputs, and which row
    of their logits to use."""
    text, lead = list(prompt), np.inf
    for begin in contexts(prompt, TOKENS, sizes.seq_len):
        inputs, row = choose(text[begin:])
        logits = sizes.logits(weights, torch.tensor([inputs]))[0, row]
        first, second = logits.topk(2).values
        # The project promises losses, and so differences of logits, within 1e-5 for logits of about 1.
        lead = min(lead, ((first - second) / logits.abs().max()).item())
        text.append(logits.argmax().item())
    return text[len(prompt):], lead


def telling_weights(sizes, seed):
    """Weights for which the next token depends on the whole context, and the likeliest token always leads clearly."""
    generator = torch.Generator().manual_seed(seed)
    T = sizes.seq_len
    while True:
        weights = {name: 4 * weight if weight.dim() == 2 and name.startswith("h.") else weight
                   for name, weight in reference_model.random_weights(sizes, generator).items()}
        expected, lead = most_likely(weights, sizes)
        others = [most_likely(weights, sizes, choose)[0] for choose in (
            lambda context: (context, len(context) // 2),  # not the last row
            lambda context: (context[-T // 2:], -1),  # less of it
            lambda context: (context[:-1] or context, -1))]  # not the last token
        if lead > 1e-3 and expected not in others and len(set(expected[T:])) > 3:
            return weights, expected
