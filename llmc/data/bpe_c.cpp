#include "llmc/data/bpe_c.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string_view>
#include <vector>

#include "llmc/core/text.h"
#include "llmc/data/bpe_files.h"

void* gpt2_bpe_open(const char* directory, char* error, size_t error_size) {
    try {
        return new llmc::BytePairEncoder(llmc::read_bpe(directory));
    } catch (const std::exception& fault) {
        if (error_size == 0) return nullptr;
        const std::string line = llmc::one_line(fault.what()).substr(0, error_size - 1);
        std::memcpy(error, line.c_str(), line.size() + 1);
        return nullptr;
    }
}

void gpt2_bpe_close(void* encoder) { delete static_cast<llmc::BytePairEncoder*>(encoder); }

int64_t gpt2_bpe_encode(void* encoder, const char* text, size_t bytes, int32_t* out, size_t capacity) {
    try {
        std::vector<std::int32_t> tokens;
        tokens.reserve(bytes / 3);  // enough for most text
        static_cast<const llmc::BytePairEncoder*>(encoder)->encode_ordinary({text, bytes}, tokens);
        if (tokens.size() > capacity) return -1;
        std::ranges::copy(tokens, out);
        return std::ssize(tokens);
    } catch (const std::exception&) {
        return -1;
    }
}
