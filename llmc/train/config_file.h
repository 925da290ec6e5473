// Configuration files in TOML. --config reads one, and every run writes one. options.h defines the settings.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace llmc {

enum class ConfigType { text, number, boolean };

struct ConfigSetting {
    int line;  // from 1
    std::string name;
    std::string value;  // as the command line would give it
    ConfigType type;
};

// The settings of a file, in the file's order. Throws UserError if the file cannot be read, is not TOML, or
// has a value that no setting accepts (a section, a list, a date). The error names the file and the line.
std::vector<ConfigSetting> read_config_file(const std::string& file);

// A text as a TOML string.
std::string as_config_text(std::string_view text);

}  // namespace llmc
