#include "llmc/data/chat_format.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <nlohmann/json.hpp>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/core/text.h"

namespace llmc {
namespace {

using Json = nlohmann::json;

std::string text_of(const Json& value, std::string_view what) {
    if (!value.is_string()) user_error("its {} is not a text", what);
    return value.get<std::string>();
}

ChatFormat parse(const std::string& text) {
    const Json json = Json::parse(text, nullptr, false);
    if (!json.is_object()) user_error("it is not an object in JSON");
    const auto at = [&](const char* key) { return json.contains(key) ? json[key] : Json(); };
    ChatFormat format;
    format.begin = text_of(at("begin"), "begin");
    format.generation = text_of(at("generation"), "generation");
    if (!at("default_system").is_null())
        format.default_system = text_of(at("default_system"), "default_system");
    format.trims = at("trims") == true;
    constexpr std::array roles = {"system", "user", "assistant"};
    for (std::size_t role = 0; role < roles.size(); ++role) {
        const Json pair = at(roles[role]);
        if (!pair.is_array() || pair.size() != 2) user_error("its {} is not a pair of texts", roles[role]);
        for (std::size_t i = 0; i < 2; ++i) format.around[role][i] = text_of(pair[i], roles[role]);
    }
    return format;
}

// The chat template of a tokenizer; empty if there is none. A new line at its end has no meaning.
std::string template_of(const std::map<std::string, std::string>& files) {
    std::string text;
    if (const auto own = files.find(chat_template_file); own != files.end()) {
        text = own->second;
    } else if (const auto config = files.find("tokenizer_config.json"); config != files.end()) {
        const Json json = Json::parse(config->second, nullptr, false);
        if (!json.is_object())
            user_error(
                "--chat: tokenizer_config.json of the model's tokenizer is not an object in JSON; get the "
                "folder again");
        const Json found = json.contains("chat_template") ? json["chat_template"] : Json();
        if (found.is_string()) text = found.get<std::string>();
        if (found.is_array()) {  // several, with names
            for (const Json& one : found) {
                if (one.is_object() && one.value("name", Json()) == "default" &&
                    one.value("template", Json()).is_string())
                    text = one["template"].get<std::string>();
            }
        }
    }
    if (text.ends_with('\n')) text.pop_back();
    return text;
}

// Without white space at both ends, as Python's str.strip() takes it.
std::string trimmed(std::string_view text) {
    static const WordPattern space(R"([\s\x{1c}-\x{1f}])");
    std::size_t begin = 0, end = 0;
    for (std::size_t place = 0; place < text.size();) {
        const std::size_t length = first_character(text.substr(place)).length;
        if (space.match(text, place) == 0) {
            end = place + length;
        } else if (end == 0) {
            begin = place + length;
        }
        place += length;
    }
    return std::string(text.substr(begin, end > begin ? end - begin : 0));
}

}  // namespace

std::vector<TextPiece> ChatFormat::pieces(std::span<const ChatMessage> messages) const {
    std::vector<TextPiece> all = {{begin, false}};
    if (messages.empty() || messages[0].role != Role::system) all.push_back({default_system, false});
    for (const ChatMessage& message : messages) {
        const auto& [before, behind] = around[static_cast<std::size_t>(message.role)];
        all.push_back({before, false});
        all.push_back({trims ? trimmed(message.text) : message.text, true});
        all.push_back({behind, false});
    }
    all.push_back({generation, false});
    return all;
}

ChatFormat find_chat_format(const std::map<std::string, std::string>& tokenizer_files,
                            const std::string& folder) {
    if (const auto own = tokenizer_files.find(chat_format_file); own != tokenizer_files.end()) {
        return naming_option(fmt::format("--chat: {} of the model's tokenizer is damaged", chat_format_file),
                             [&] { return parse(own->second); });
    }
    const std::string text = template_of(tokenizer_files);
    if (text.empty())
        user_error(
            "--chat: the model's tokenizer has no chat template, so it was not made for conversations; use "
            "--generate, or write what a template puts around texts with "
            "`python data/chat.py --format {} --template FILE`",
            folder);
    const std::string checksum = fmt::format("{:016x}", XXH3_64bits(text.data(), text.size()));
    for (const char* const known : known_chat_formats()) {
        if (Json::parse(known)["template"] == checksum) return parse(known);
    }
    user_error(
        "--chat: the model's chat template is not known here; `python data/chat.py --format {}` finds what "
        "it "
        "writes around each text, and keeps it there",
        folder);
}

}  // namespace llmc
