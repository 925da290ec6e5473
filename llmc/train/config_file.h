// Configuration files: what --config reads and a run leaves behind. They are TOML of the simplest kind,
//
//   # a comment
//   layers = 4
//   train-data = "book.txt"
//
// one setting a line. What the settings are and which values they take is options.h's business.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace llmc {

struct ConfigSetting {
    int line;  // from 1
    std::string name;
    std::string value;
    bool quoted;  // a text; else a number
};

// The settings of a file in its order. UserError that names the file, and the line where there is one, for a
// file that cannot be read, a line of another form and a setting that is there twice.
std::vector<ConfigSetting> read_config_file(const std::string& file);

// A text as the value of a setting, in quotation marks.
std::string as_config_text(std::string_view text);

}  // namespace llmc
