#include "llmc/train/config_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "llmc/core/error.h"
#include "llmc/io/files.h"

namespace llmc {

namespace {

constexpr std::string_view blanks = " \t\r";
constexpr std::string_view form = "a line is NAME = NUMBER or NAME = \"TEXT\"";

// What is wrong with a line; read_config_file adds the place.
class Malformed : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

void skip_blanks(std::string_view& rest) {
    rest.remove_prefix(std::min(rest.find_first_not_of(blanks), rest.size()));
}

// Takes the text in quotation marks off the front of the rest. 'as it is', "with \\ escapes".
std::string take_text(std::string_view& rest) {
    const char quote = rest.front();
    std::string text;
    for (std::size_t i = 1; i < rest.size(); ++i) {
        char c = rest[i];
        if (c == quote) {
            rest.remove_prefix(i + 1);
            return text;
        }
        if (quote == '"' && c == '\\' && i + 1 < rest.size()) {
            constexpr std::string_view escapes = "\"\\nt", meanings = "\"\\\n\t";
            const std::size_t which = escapes.find(rest[++i]);
            if (which == std::string_view::npos) {
                throw Malformed(fmt::format("\\{} stands for nothing; write \\\\ for a backslash", rest[i]));
            }
            c = meanings[which];
        }
        text += c;
    }
    throw Malformed("a text has no closing quotation mark");
}

std::optional<ConfigSetting> parse_line(std::string_view line) {
    skip_blanks(line);
    if (line.empty() || line.front() == '#') return std::nullopt;
    if (line.front() == '[') throw Malformed("there are no sections; " + std::string(form));
    const std::size_t name_end = std::min(line.find_first_of(" \t\r=#\"'"), line.size());
    ConfigSetting setting{
        .line = 0, .name = std::string(line.substr(0, name_end)), .value = {}, .quoted = false};
    line.remove_prefix(name_end);
    skip_blanks(line);
    if (setting.name.empty() || !line.starts_with('=')) throw Malformed(std::string(form));
    line.remove_prefix(1);
    skip_blanks(line);
    if (line.empty() || line.front() == '#') throw Malformed(fmt::format("{} has no value", setting.name));
    if (line.front() == '"' || line.front() == '\'') {
        setting.quoted = true;
        setting.value = take_text(line);
    } else {
        const std::size_t end = std::min(line.find_first_of(" \t\r#"), line.size());
        setting.value = std::string(line.substr(0, end));
        line.remove_prefix(end);
    }
    skip_blanks(line);
    if (!line.empty() && line.front() != '#') {
        throw Malformed(fmt::format("after the value of {} there is more: {}", setting.name, line));
    }
    return setting;
}

}  // namespace

std::vector<ConfigSetting> read_config_file(const std::string& file) {
    const std::string text = read_file(file);
    std::vector<ConfigSetting> settings;
    std::string_view rest = text;
    for (int number = 1; !rest.empty(); ++number) {
        const std::size_t length = std::min(rest.find('\n'), rest.size());
        try {
            std::optional<ConfigSetting> setting = parse_line(rest.substr(0, length));
            if (setting) {
                const auto earlier = std::ranges::find(settings, setting->name, &ConfigSetting::name);
                if (earlier != settings.end()) {
                    throw Malformed(
                        fmt::format("{} is set in line {} already", setting->name, earlier->line));
                }
                setting->line = number;
                settings.push_back(std::move(*setting));
            }
        } catch (const Malformed& fault) {
            user_error("{}, line {}: {}", file, number, fault.what());
        }
        rest.remove_prefix(std::min(length + 1, rest.size()));
    }
    return settings;
}

std::string as_config_text(std::string_view text) {
    std::string value = "\"";
    for (const char c : text) {
        if (c == '\n') {
            value += "\\n";
        } else if (c == '\t') {
            value += "\\t";
        } else {
            if (c == '"' || c == '\\') value += '\\';
            value += c;
        }
    }
    return value + '"';
}

}  // namespace llmc
