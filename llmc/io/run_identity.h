// Which run a directory of results belongs to. A new run in a directory that was used before gets another
// identity, so that a later --resume does not take an earlier run's checkpoint for its own.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace llmc {

// Like no other.
std::string new_run_identity();

// What the file run.json of a directory says; nothing where there is none. UserError if it is damaged.
std::optional<std::string> read_run_identity(const std::filesystem::path& out_dir);
void write_run_identity(const std::filesystem::path& out_dir, const std::string& run);

}  // namespace llmc
