// The text of a conversation as a model's chat template writes it, without the template's language: what stands
// around the text of each role. data/chat.py finds it, and proves that the template writes the same; a few templates
// are known here.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/data/tokenizer.h"

namespace llmc {

inline constexpr const char* chat_format_file = "chat_format.json";
inline constexpr const char* chat_template_file = "chat_template.jinja";

enum class Role : std::uint8_t { system, user, assistant };

struct ChatMessage {
    Role role;
    std::string text;
};

struct ChatFormat {
    std::string begin;                                 // before everything
    std::array<std::array<std::string, 2>, 3> around;  // before and behind the text of each role
    std::string generation;                            // begins an answer
    std::string default_system;                        // where there is no system message
    bool trims = false;                                // white space around a text is left out

    // The text after which an answer to the last message is to follow. The messages' own texts are ordinary.
    std::vector<TextPiece> pieces(std::span<const ChatMessage> messages) const;
};

// The format of a model: of the chat_format.json among the files of its tokenizer, or of its template, if that is a
// known one. UserError, which says how to make one, if there is none.
ChatFormat find_chat_format(const std::map<std::string, std::string>& tokenizer_files,
                            const std::string& folder);

// The formats of known templates, each as the text of a chat_format.json (known_chat_formats.cpp).
std::span<const char* const> known_chat_formats();

}  // namespace llmc
