#include "llmc/train/config_file.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <sstream>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/files.h"

namespace llmc {

namespace {

constexpr std::size_t most_shown = 100;  // characters of a key, in a message

int line_of(const toml::source_region& source) { return static_cast<int>(source.begin.line); }

ConfigSetting setting_of(const std::string& name, const toml::node& node) {
    ConfigSetting setting{
        .line = line_of(node.source()), .name = name, .value = {}, .type = ConfigType::number};
    if (const auto* text = node.as_string()) {
        setting.value = text->get();
        setting.type = ConfigType::text;
    } else if (const auto* integer = node.as_integer()) {
        setting.value = fmt::to_string(integer->get());
    } else if (const auto* number = node.as_floating_point()) {
        setting.value = fmt::to_string(number->get());
    } else if (const auto* boolean = node.as_boolean()) {
        setting.value = boolean->get() ? "true" : "false";
        setting.type = ConfigType::boolean;
    } else {
        user_error("{} is a section, a list or a date; give a number, a text, true or false", name);
    }
    return setting;
}

// The key on a line of the file, or the name of the section that the line opens.
std::string key_in_line(const std::string& text, int line) {
    std::istringstream lines(text);
    std::string found;
    for (int i = 0; i < line; ++i) std::getline(lines, found);
    found = one_line(found.substr(0, std::min(found.find_first_of("=#"), most_shown)));
    const std::size_t begin = found.find_first_not_of(' ');
    return begin == std::string::npos ? "" : found.substr(begin, found.find_last_not_of(' ') + 1 - begin);
}

// The dots of keys and numbers: those outside of texts and comments. Texts follow TOML's rules: they begin and end
// with one or three marks of a kind, and a backslash between " marks hides the next character.
std::size_t dots_outside_quotes(std::string_view text) {
    std::size_t dots = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
        const char mark = text[i];
        if (mark == '.') ++dots;
        if (mark == '#') i = std::min(text.find('\n', i), text.size());
        if (mark != '"' && mark != '\'') continue;
        const std::string three(3, mark);
        const std::string_view end = text.substr(i).starts_with(three) ? three : std::string_view(&mark, 1);
        i += end.size();
        while (i < text.size() && !text.substr(i).starts_with(end))
            i += mark == '"' && text[i] == '\\' ? 2 : 1;
        i += end.size() - 1;
        // The last marks of a text between three marks may be its own.
        for (int own = 0; end.size() == 3 && own < 2 && i + 1 < text.size() && text[i + 1] == mark; ++own)
            ++i;
    }
    return dots;
}

}  // namespace

std::vector<ConfigSetting> read_config_file(const std::string& file) {
    // toml++ handles a dotted key recursively, so a key with many thousand dots would overflow the stack.
    constexpr std::size_t most_dots = 1000;
    const std::string text = naming_option("--config", [&] { return read_file(file); });
    if (const std::size_t dots = dots_outside_quotes(text); dots > most_dots) {
        user_error("{} has {} dots outside of quotation marks; a configuration file may have {} at most",
                   file, dots, most_dots);
    }
    std::vector<ConfigSetting> settings;
    int line = 0;
    try {
        const toml::table table = toml::parse(text);
        for (const auto& [name, node] : table) {
            line = line_of(node.source());
            settings.push_back(setting_of(std::string(name.str()), node));
        }
    } catch (const toml::parse_error& fault) {
        const int at = line_of(fault.source());
        // toml++'s own message garbles a key in quotation marks.
        if (fault.description().find("cannot redefine existing") != std::string_view::npos)
            user_error("{}, line {}: {} is given twice; leave one out", file, at, key_in_line(text, at));
        user_error("{}, line {}: {}", file, at, fault.description());
    } catch (const UserError& fault) {
        user_error("{}, line {}: {}", file, line, fault.what());
    }
    std::ranges::stable_sort(settings, {}, &ConfigSetting::line);
    return settings;
}

std::string as_config_text(std::string_view text) {
    std::string value = "\"";
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (c == '"' || c == '\\') {
            value += {'\\', c};
        } else if (byte < 0x20 || byte == 0x7f) {
            value += fmt::format("\\u{:04x}", byte);
        } else {
            value += c;
        }
    }
    return value + '"';
}

}  // namespace llmc
