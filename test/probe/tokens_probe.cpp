// tokens_probe FOLDER
//
// Encodes texts with the tokenizer of a folder, so that a script can compare it with another implementation. Its
// input is one byte for each text, s if special tokens count and o if they are ordinary text, then the number of
// bytes as uint32, and the bytes. For each it writes the number of ids and the ids as int32, then the number of bytes
// that they decode to, and these. Without a text it only writes the checksum of the tokenizer, in hexadecimal digits.
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "llmc/data/tokenizer_files.h"

namespace {

bool read(void* out, std::size_t bytes) { return std::fread(out, 1, bytes, stdin) == bytes; }
template <class Values>
void write(const Values& values) {
    const auto count = static_cast<std::uint32_t>(values.size());
    std::fwrite(&count, sizeof(count), 1, stdout);
    std::fwrite(values.data(), sizeof(values[0]), values.size(), stdout);
}

void run(const char* folder) {
    const llmc::Tokenizer tokenizer = llmc::read_tokenizer(folder);
    char kind = 0;
    if (!read(&kind, 1)) fmt::print("{:016x}", tokenizer.checksum());
    for (bool goes_on = kind != 0; goes_on; goes_on = read(&kind, 1)) {
        std::uint32_t size = 0;
        if (!read(&size, sizeof(size))) return;
        std::string text(size, '\0');
        if (!read(text.data(), size)) return;
        const std::vector<std::int32_t> ids =
            kind == 's' ? tokenizer.encode(text) : tokenizer.encode_ordinary(text);
        write(ids);
        write(tokenizer.decode(ids));
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        fmt::print(stderr, "error: expected FOLDER\n");
        return 2;
    }
    try {
        run(argv[1]);
    } catch (const std::exception& fault) {
        fmt::print(stderr, "error: {}\n", fault.what());
        return 1;
    }
}
