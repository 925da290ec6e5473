#!/usr/bin/env python3
"""The generation that bench_generation.py compares with: llama.cpp, as the wheel xllamacpp has it.

    llama_tokens.py GGUF THREADS CONTEXT TOKENS PROMPT-TOKEN...

It uses bench_step's protocol: a first line about itself, then for each line "step" on standard input a line of JSON with
the milliseconds of each token after the first.
"""

import json
import sys

import xllamacpp


def main():
    path = sys.argv[1]
    threads, context, tokens, *prompt = map(int, sys.argv[2:])
    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.n_ctx, parameters.n_parallel = context, 1
    parameters.verbosity = 0
    server = xllamacpp.Server(parameters)
    print(json.dumps({"version": xllamacpp.__version__}), flush=True)
    for _ in sys.stdin:
        answer = server.handle_completions({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                                            "cache_prompt": False})
        timings = answer["timings"]
        assert timings["predicted_n"] == tokens, answer
        print(json.dumps({"ms": timings["predicted_per_token_ms"]}), flush=True)


if __name__ == "__main__":
    main()
