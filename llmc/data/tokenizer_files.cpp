#include "llmc/data/tokenizer_files.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/files.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// The files write each byte as a visible character. Bytes that are printable in Latin-1 stand for themselves;
// the others, in order, are U+0100 and up.
class ByteNames {
  public:
    ByteNames() {
        byte_of_.fill(-1);
        char32_t next = 0x100;
        for (int byte = 0; byte < 256; ++byte) {
            const bool has_name = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
            byte_of_[has_name ? static_cast<char32_t>(byte) : next++] = byte;
        }
    }

    // The bytes in the order of GPT-2's ids: first those that stand for themselves.
    std::string in_order() const {
        std::string bytes;
        for (const bool printable : {true, false}) {
            for (std::size_t code = 0; code < byte_of_.size(); ++code) {
                if (byte_of_[code] >= 0 && (byte_of_[code] == static_cast<int>(code)) == printable)
                    bytes += static_cast<char>(byte_of_[code]);
            }
        }
        return bytes;
    }

    // The bytes that a name stands for. A name with a character that stands for none is itself.
    std::string bytes(const std::string& name) const {
        std::string bytes;
        for (std::string_view rest = name; !rest.empty();) {
            const Utf8Character character = first_character(rest);
            const int byte = character.code < byte_of_.size() ? byte_of_[character.code] : -1;
            if (byte < 0) return name;
            bytes += static_cast<char>(byte);
            rest.remove_prefix(character.length);
        }
        return bytes;
    }

  private:
    std::array<int, 0x200> byte_of_{};
};

Json parse(const fs::path& file) {
    try {
        return Json::parse(read_file(file));
    } catch (const Json::parse_error& fault) {
        user_error("it is not JSON at byte {}", fault.byte);
    }
}

// The value of a key; null if there is none.
const Json& at(const Json& object, const char* key) {
    static const Json none;
    if (!object.is_object()) return none;
    const auto found = object.find(key);
    return found == object.end() ? none : *found;
}

std::string text_at(const Json& object, const char* key) {
    const Json& value = at(object, key);
    return value.is_string() ? value.get<std::string>() : "";
}

bool flag_at(const Json& object, const char* key, bool otherwise = false) {
    const Json& value = at(object, key);
    return value.is_boolean() ? value.get<bool>() : otherwise;
}

// The largest id that a file may have: far more than any tokenizer's, and few enough for memory.
constexpr std::int64_t most_ids = 1 << 22;

std::int32_t id_in(const Json& value, std::string_view of) {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() >= most_ids)
        user_error("the id of '{}' is not a whole number below {}", one_line(of), most_ids);
    return value.get<std::int32_t>();
}

// Takes the ids of all names that a file gives one, except those that it adds.
void take_ids(const Json& ids, const ByteNames& names, TokenizerParts& parts) {
    if (!ids.is_object()) user_error("its tokens are not an object of names and ids");
    std::unordered_map<std::int32_t, std::string> added;
    for (const AddedToken& token : parts.added) added.emplace(token.id, token.text);
    // Added tokens beyond the others follow them without a gap: `tokenizers` would number them so.
    std::int64_t next = std::ssize(ids);
    for (const AddedToken& token : parts.added) {
        const Json& id = at(ids, token.text.c_str());
        if (!id.is_null() && id != token.id) user_error("'{}' has two ids", one_line(token.text));
        if (id.is_null() && token.id != next)
            user_error("the id of '{}' is {}, and not the next one, {}", one_line(token.text), token.id,
                       next);
        if (id.is_null()) ++next;
    }
    for (const auto& [name, value] : ids.items()) {
        const std::int32_t id = id_in(value, name);
        const auto place = static_cast<std::size_t>(id);
        if (const auto found = added.find(id); found != added.end()) {
            if (found->second != name)
                user_error("'{}' and '{}' have the same id", one_line(name), one_line(found->second));
            continue;
        }
        if (place >= parts.tokens.size()) parts.tokens.resize(place + 1);
        if (parts.tokens[place]) user_error("two tokens have the id {}", id);
        parts.tokens[place] = names.bytes(name);
    }
}

// Takes merges, each as the names of two tokens.
class MergeReader {
  public:
    MergeReader(const Json& ids, std::string_view where, TokenizerParts& parts)
        : ids_(ids), where_(where), parts_(parts) {}

    void take(const std::string& left, const std::string& right) {
        parts_.merges.push_back({id_of(left), id_of(right), id_of(left + right)});
    }
    void take(std::string_view line) {
        const std::size_t space = line.find(' ');
        if (space == std::string_view::npos || space == 0 || space + 1 == line.size())
            user_error("expected two tokens with a space between them");
        take(std::string(line.substr(0, space)), std::string(line.substr(space + 1)));
    }

  private:
    std::int32_t id_of(const std::string& name) const {
        const auto found = ids_.find(name);
        if (found == ids_.end()) user_error("'{}' has no id in {}", one_line(name), where_);
        return id_in(*found, name);
    }

    const Json& ids_;
    std::string_view where_;
    TokenizerParts& parts_;
};

[[noreturn]] void refuse_part(std::string_view part, const Json& of) {
    const std::string all = of.dump();
    user_error("its {} is {}, which this program does not know", part,
               one_line(all.size() < 120 ? all : fmt::format("of the type {}", at(of, "type").dump())));
}

// The members of a Sequence, in order; of anything else the thing itself.
std::vector<Json> members(const Json& part, const char* key) {
    if (part.is_null()) return {};
    if (text_at(part, "type") != "Sequence") return {part};
    std::vector<Json> all;
    for (const Json& member : at(part, key)) {
        const std::vector<Json> inner = members(member, key);
        all.insert(all.end(), inner.begin(), inner.end());
    }
    return all;
}

void take_normalizer(const Json& normalizer, TokenizerParts& parts) {
    for (const Json& member : members(normalizer, "normalizers")) {
        if (text_at(member, "type") != "NFC") refuse_part("normalizer", member);
        parts.is_nfc = true;
    }
}

WordRule split_rule(const Json& member) {
    const Json& pattern = at(member, "pattern");
    if (text_at(member, "behavior") != "Isolated" || flag_at(member, "invert"))
        refuse_part("pre-tokenizer", member);
    if (at(pattern, "Regex").is_string()) return {WordRule::Kind::pattern, text_at(pattern, "Regex")};
    if (text_at(pattern, "String").empty()) refuse_part("pre-tokenizer", member);
    return {WordRule::Kind::text, text_at(pattern, "String")};
}

WordRule gpt2_rule() {
    WordRule rule{WordRule::Kind::pattern, {}};
    rule.text = gpt2_words;
    return rule;
}

void take_words(const Json& pre_tokenizer, TokenizerParts& parts) {
    bool is_byte_level = false;
    for (const Json& member : members(pre_tokenizer, "pretokenizers")) {
        const std::string type = text_at(member, "type");
        if (is_byte_level) user_error("its pre-tokenizer has {} behind ByteLevel", type);
        if (type == "Split") {
            parts.words.push_back(split_rule(member));
        } else if (type == "Digits") {
            parts.words.push_back({WordRule::Kind::digits, "", flag_at(member, "individual_digits")});
        } else if (type == "ByteLevel" && !flag_at(member, "add_prefix_space")) {
            is_byte_level = true;
            if (flag_at(member, "use_regex", true)) parts.words.push_back(gpt2_rule());
        } else {
            refuse_part("pre-tokenizer", member);
        }
    }
    if (!is_byte_level) user_error("it is not byte-level: its pre-tokenizer has no ByteLevel");
}

// The tokens before a text; what the processor puts behind one is for other uses.
void take_beginning(const Json& processor, TokenizerParts& parts) {
    for (const Json& member : members(processor, "processors")) {
        const std::string type = text_at(member, "type");
        if (type == "ByteLevel") continue;
        if (type != "TemplateProcessing") refuse_part("post-processor", member);
        for (const Json& piece : at(member, "single")) {
            if (piece.contains("Sequence")) break;
            const std::string name = text_at(at(piece, "SpecialToken"), "id");
            const Json& ids = at(at(at(member, "special_tokens"), name.c_str()), "ids");
            if (!ids.is_array()) refuse_part("post-processor", piece);
            for (const Json& id : ids) parts.beginning.push_back(id_in(id, name));
        }
    }
}

void take_added(const Json& all, TokenizerParts& parts) {
    for (const Json& token : all) {
        const std::string text = text_at(token, "content");
        if (text.empty()) user_error("an added token has no content");
        if (flag_at(token, "single_word"))
            user_error("the added token '{}' has single_word, which is not known", one_line(text));
        parts.added.push_back({.id = id_in(at(token, "id"), text),
                               .text = text,
                               .is_special = flag_at(token, "special"),
                               .strips_left = flag_at(token, "lstrip"),
                               .strips_right = flag_at(token, "rstrip"),
                               .is_normalized = flag_at(token, "normalized")});
    }
}

void take_model(const Json& model, TokenizerParts& parts) {
    const Json& type = at(model, "type");
    if (!type.is_null() && type != "BPE")
        user_error("its model is {}, and only BPE is known", one_line(type.dump()));
    for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
        const Json& value = at(model, key);
        if (!value.is_null() && value != Json("")) refuse_part(key, value);  // an empty prefix is none
    }
    if (flag_at(model, "byte_fallback"))
        user_error("its model falls back to bytes, as SentencePiece's do, which is not known");
    parts.ignores_merges = flag_at(model, "ignore_merges");
    const ByteNames names;
    take_ids(at(model, "vocab"), names, parts);
    const Json& merges = at(model, "merges");
    if (!merges.is_array()) user_error("its model has no list of merges");
    MergeReader reader(at(model, "vocab"), "the vocab", parts);
    for (std::size_t i = 0; i < merges.size(); ++i) {
        const Json& merge = merges[i];
        naming_option(fmt::format("merge {}", i + 1), [&] {
            if (merge.is_string()) {
                reader.take(merge.get_ref<const std::string&>());
            } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
                       merge[1].is_string()) {
                reader.take(merge[0].get<std::string>(), merge[1].get<std::string>());
            } else {
                user_error("expected two tokens");
            }
        });
    }
    if (at(model, "unk_token").is_null()) return;
    for (int byte = 0; byte < 256; ++byte) {
        const auto one = std::optional(std::string(1, static_cast<char>(byte)));
        if (std::ranges::find(parts.tokens, one) == parts.tokens.end())
            user_error("its model lacks bytes and has an unk_token for them, which is not known");
    }
}

TokenizerParts parts_of_json(const fs::path& file) {
    const Json json = parse(file);
    if (!json.is_object()) user_error("it is not an object in JSON");
    TokenizerParts parts;
    take_added(at(json, "added_tokens"), parts);
    take_normalizer(at(json, "normalizer"), parts);
    take_words(at(json, "pre_tokenizer"), parts);
    take_beginning(at(json, "post_processor"), parts);
    take_model(at(json, "model"), parts);
    return parts;
}

// GPT-2's files: its words, and one special token, the end of text.
TokenizerParts parts_of_gpt2(const fs::path& ids_file, const fs::path& merges_file) {
    TokenizerParts parts;
    parts.words.push_back(gpt2_rule());
    const Json ids = naming_option(fmt::format("'{}'", ids_file.string()), [&] {
        Json all = parse(ids_file);
        const Json& end = at(all, std::string(end_of_text_name).c_str());
        if (end.is_null()) user_error("it has no {}", end_of_text_name);
        parts.added.push_back(
            {.id = id_in(end, end_of_text_name), .text = std::string(end_of_text_name), .is_special = true});
        const ByteNames names;
        take_ids(all, names, parts);
        return all;
    });
    const std::string ids_name = ids_file.filename().string();
    MergeReader reader(ids, ids_name, parts);
    const std::string text = read_file(merges_file);
    std::int64_t number = 0;
    for (std::string_view rest = text; !rest.empty();) {
        const std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(line.size() + 1, rest.size()));
        number += 1;
        if (number == 1 && line.starts_with("#version")) continue;
        naming_option(fmt::format("'{}', line {}", merges_file.string(), number), [&] { reader.take(line); });
    }
    // First come the bytes, then the results of the merges, then the end of text.
    std::vector<std::string> expected;
    for (const char byte : ByteNames().in_order()) expected.emplace_back(1, byte);
    for (const TokenizerParts::Merge& merge : parts.merges)
        expected.push_back(parts.tokens.at(static_cast<std::size_t>(merge.merged)).value_or(""));
    const bool is_in_order =
        std::ranges::equal(parts.tokens, expected) && parts.added[0].id == std::ssize(expected);
    if (!is_in_order)
        user_error(
            "'{}' is damaged, or not of the {} merges of {} in the same folder: its {} ids do not follow "
            "from them",
            ids_file.string(), parts.merges.size(), merges_file.filename().string(), ids.size());
    return parts;
}

bool is_there(const fs::path& file) {
    std::error_code ignored;
    return fs::exists(file, ignored);
}

}  // namespace

Tokenizer read_tokenizer(const fs::path& folder) {
    const fs::path file = folder / tokenizer_file;
    if (is_there(file)) {
        return naming_option(fmt::format("'{}'", file.string()),
                             [&] { return Tokenizer(parts_of_json(file)); });
    }
    for (const auto& [ids, merges] :
         {std::pair(gpt2_ids_file, gpt2_merges_file), std::pair("vocab.json", "merges.txt")}) {
        if (!is_there(folder / ids)) continue;
        if (!is_there(folder / merges))
            user_error("there is no file '{}'; {}", (folder / merges).string(), advice_for_tokenizer());
        return Tokenizer(parts_of_gpt2(folder / ids, folder / merges));
    }
    user_error("there is no {} in '{}', and not GPT-2's {} and {}; {}", tokenizer_file, folder.string(),
               gpt2_ids_file, gpt2_merges_file, advice_for_tokenizer());
}

std::string advice_for_tokenizer(std::int64_t vocabulary) {
    if (vocabulary != gpt2_vocabulary)
        return fmt::format("give the folder of a tokenizer of {} tokens with --tokenizer", vocabulary);
    return fmt::format(
        "run `python data/bpe_files.py`, which makes GPT-2's {} and {} in {}, or give the folder of another "
        "tokenizer with "
        "--tokenizer",
        gpt2_ids_file, gpt2_merges_file, gpt2_tokenizer_folder);
}

std::optional<Tokenizer> open_tokenizer(const std::string& folder, std::string_view asked_by,
                                        std::int64_t vocabulary, std::vector<std::string>& notes) {
    if (folder.empty())
        return vocabulary == byte_vocabulary ? std::optional(Tokenizer::of_bytes()) : std::nullopt;
    try {
        Tokenizer tokenizer = read_tokenizer(folder);
        if (tokenizer.vocabulary() > vocabulary) {
            user_error(
                "that of '{}' has {} tokens, but the model's vocabulary is {}; give its own, or try "
                "--vocab-size {}",
                folder, tokenizer.vocabulary(), vocabulary, tokenizer.vocabulary());
        }
        return tokenizer;
    } catch (const UserError& fault) {
        if (!asked_by.empty()) user_error("{}: {}", asked_by, fault.what());
        notes.push_back(
            fmt::format("text is token ids here, since the tokenizer cannot be used: {}", fault.what()));
        return std::nullopt;
    }
}

}  // namespace llmc
