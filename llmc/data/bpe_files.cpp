#include "llmc/data/bpe_files.h"

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/files.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;

// The files write each byte as a visible character. Bytes that are printable in Latin-1 stand for themselves;
// the others, in order, are U+0100 and up. Among the ids the printable ones come first.
class ByteNames {
  public:
    ByteNames() {
        byte_of_.fill(-1);
        char32_t next = 0x100;
        for (const bool printable : {true, false}) {
            for (int byte = 0; byte < 256; ++byte) {
                const bool has_name = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
                if (has_name != printable) continue;
                byte_of_[printable ? static_cast<char32_t>(byte) : next++] = byte;
                in_order_ += static_cast<char>(byte);
            }
        }
    }

    const std::string& in_order() const { return in_order_; }

    // The bytes that a name stands for; UserError with the reason if it stands for none.
    std::string bytes(std::string_view name) const {
        if (name.empty()) user_error("a token is empty");
        std::string bytes;
        while (!name.empty()) {
            const Utf8Character character = first_character(name);
            const int byte = character.code < byte_of_.size() ? byte_of_[character.code] : -1;
            if (byte < 0)
                user_error("U+{:04X} does not stand for a byte", static_cast<std::uint32_t>(character.code));
            bytes += static_cast<char>(byte);
            name.remove_prefix(character.length);
        }
        return bytes;
    }

  private:
    std::string in_order_;
    std::array<int, 0x200> byte_of_{};
};

[[noreturn]] void refuse(const fs::path& file, std::string_view why) {
    user_error("'{}' is damaged, or not a file of GPT-2's byte-pair encoding: {}; download it again",
               file.string(), one_line(why));
}

// The bytes of all tokens except the end of text, by id.
std::vector<std::string> read_merges(const fs::path& file, const ByteNames& names) {
    const std::string text = read_file(file);
    std::vector<std::string> tokens;
    for (const char byte : names.in_order()) tokens.emplace_back(1, byte);
    std::int64_t number = 0;
    for (std::string_view rest = text; !rest.empty();) {
        const std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(line.size() + 1, rest.size()));
        number += 1;
        if (number == 1 && line.starts_with("#version")) continue;
        const std::size_t space = line.find(' ');
        try {
            if (space == std::string_view::npos) user_error("expected two tokens with a space between them");
            tokens.push_back(names.bytes(line.substr(0, space)) + names.bytes(line.substr(space + 1)));
        } catch (const UserError& fault) {
            refuse(file, fmt::format("line {}: {}", number, fault.what()));
        }
    }
    return tokens;
}

// Checks that the file gives every token the id of its place in `tokens`, and the end of text the id after
// them.
void check_ids(const fs::path& file, const ByteNames& names, const std::vector<std::string>& tokens) {
    nlohmann::json ids;
    try {
        ids = nlohmann::json::parse(read_file(file));
    } catch (const nlohmann::json::parse_error& fault) {
        refuse(file, fmt::format("it is not JSON at byte {}", fault.byte));
    }
    if (!ids.is_object()) refuse(file, "it is not an object of tokens and their ids");
    const auto disagree = [&](const std::string& why) {
        refuse(file, fmt::format("{}, but {} in the same directory has {} merges", why, bpe_merges_file,
                                 tokens.size() - names.in_order().size()));
    };
    if (ids.size() != tokens.size() + 1) disagree(fmt::format("it has {} tokens", ids.size()));
    for (const auto& [name, id] : ids.items()) {
        if (!id.is_number_unsigned()) refuse(file, fmt::format("the id of '{}' is not a whole number", name));
        const auto place = id.get<std::uint64_t>();
        if (name == end_of_text_name) {
            if (place != tokens.size()) disagree(fmt::format("the id of {} is {}", end_of_text_name, place));
            continue;
        }
        const std::string bytes = naming_option(fmt::format("'{}'", file.string()),
                                                [&, &name = name] { return names.bytes(name); });
        if (place >= tokens.size() || tokens[place] != bytes)
            disagree(fmt::format("the id of '{}' is {}", name, place));
    }
    if (!ids.contains(end_of_text_name)) refuse(file, fmt::format("it has no {}", end_of_text_name));
}

}  // namespace

BytePairEncoder read_bpe(const fs::path& directory) {
    for (const char* const file : {bpe_ids_file, bpe_merges_file}) {
        std::error_code ignored;
        if (!fs::exists(directory / file, ignored)) {
            user_error("there is no file '{}'; {}", (directory / file).string(), advice_for_bpe());
        }
    }
    const ByteNames names;
    std::vector<std::string> tokens = read_merges(directory / bpe_merges_file, names);
    check_ids(directory / bpe_ids_file, names, tokens);
    return BytePairEncoder(std::move(tokens));
}

std::string advice_for_bpe(std::int64_t vocabulary) {
    if (vocabulary != gpt2_vocabulary)
        return fmt::format("give the directory of an encoding of {} tokens with --bpe-dir", vocabulary);
    return fmt::format(
        "run `python data/bpe_files.py`, which makes GPT-2's {} and {} in {}, or give their directory with "
        "--bpe-dir",
        bpe_ids_file, bpe_merges_file, default_bpe_directory);
}

std::optional<BytePairEncoder> find_bpe(const std::string& directory, std::int64_t vocabulary) {
    if (directory.empty()) {
        std::error_code ignored;
        const bool has_default = vocabulary == gpt2_vocabulary &&
                                 fs::exists(fs::path(default_bpe_directory) / bpe_ids_file, ignored);
        if (!has_default) return std::nullopt;
        return naming_option("--bpe-dir", [] { return read_bpe(default_bpe_directory); });
    }
    BytePairEncoder bpe = naming_option("--bpe-dir", [&] { return read_bpe(directory); });
    if (bpe.vocabulary() != vocabulary) {
        user_error(
            "--bpe-dir: the encoding in '{}' has {} tokens, but the model's vocabulary is {}; leave it out, "
            "or try --vocab-size {}",
            directory, bpe.vocabulary(), vocabulary, bpe.vocabulary());
    }
    return bpe;
}

}  // namespace llmc
