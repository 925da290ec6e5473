// Configuration files in TOML: what --config reads and a run leaves behind. What the settings are and which values
// they take is options.h's business.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace llmc {

enum class ConfigType { text, number, truth };

struct ConfigSetting {
    int line;  // from 1
    std::string name;
    std::string value;  // as on the command line
    ConfigType type;
};

// The settings of a file in its order. UserError that names the file, and the line where there is one, for a file
// that cannot be read or is no TOML, and for what no setting takes (sections, lists, dates).
std::vector<ConfigSetting> read_config_file(const std::string& file);

// A text as a TOML string.
std::string as_config_text(std::string_view text);

}  // namespace llmc
