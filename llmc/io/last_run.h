// The run that a directory of results belongs to last. Every start of the program is a run of its own, with what it
// went on from: so that a --resume takes neither an earlier run's checkpoint in the same directory for its own, nor
// one of a branch that was left.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace llmc {

// Like no other.
std::string new_run_identity();

struct RunRecord {
    std::string identity;
    std::filesystem::path began_from;  // a checkpoint; empty if the run began afresh
};

// What the file run.json of a directory says; nothing where there is none. UserError if it is damaged.
std::optional<RunRecord> read_last_run(const std::filesystem::path& out_dir);
void write_last_run(const std::filesystem::path& out_dir, const RunRecord& run);

}  // namespace llmc
