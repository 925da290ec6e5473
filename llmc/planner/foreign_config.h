// What a configuration of DeepSpeed (JSON) or Hugging Face Accelerate (YAML) says, as options of a run.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace llmc {

struct ForeignSetting {
    std::string option, value;  // without dashes, as a command line gives it
    std::string key;            // of the file, with dots between sections
};

struct ForeignConfig {
    std::string file;
    std::vector<ForeignSetting> settings;  // each option once
    // Sequences of a step, and micro-batches of a process in it. Our options have tokens and no accumulation.
    std::optional<std::int64_t> batch, accumulation;
    // Keys that ask for nothing here: with the value "auto", unknown ones, and by the reason those that are ignored.
    std::vector<std::string> automatic, unknown;
    std::map<std::string, std::vector<std::string>> ignored;
    std::vector<std::string> notes;

    const ForeignSetting* setting(std::string_view option) const;  // null if there is none
};

// UserError in one line, with file and key, for a value that their program would not take either.
ForeignConfig read_foreign_config(const std::string& file);

}  // namespace llmc
