// GPT-2's byte-pair encoding for programs in other languages: the scripts of data/ open build/libgpt2_bpe.so
// (`make tokenizer`) with Python's ctypes. C++ uses bpe.h.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Makes the encoder of the files encoder.json and vocab.bpe in `directory`. On failure returns null and
// writes one line to `error`, which has room for `error_size` bytes including the terminating zero.
void* gpt2_bpe_open(const char* directory, char* error, size_t error_size);

void gpt2_bpe_close(void* encoder);

// Writes the ids of a text to `out` and returns their number. There are at most `bytes` ids. Returns -1, with
// undefined content of `out`, if `capacity` is too small or memory has run out. "<|endoftext|>" in the text
// becomes ordinary tokens, never 50256. Bytes that are not UTF-8 are encoded as U+FFFD, as after Python's
// bytes.decode("utf-8", errors="replace"). Any number of threads may encode with one encoder at once.
int64_t gpt2_bpe_encode(void* encoder, const char* text, size_t bytes, int32_t* out, size_t capacity);

#ifdef __cplusplus
}
#endif
