// What a run will write, checked before it computes anything: so that hours of training do not end at a directory
// that is not there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "llmc/train/options.h"

namespace llmc {

// Where results go: as asked, beside the checkpoint that is resumed, for --resume alone in the newest of the default
// places, or in a directory of its own by the time.
std::filesystem::path choose_out_dir(const Options& options);
// Makes that directory, or where another run has it already the next one: "runs/2026-01-31_12-00-00-2". Returns
// which.
std::filesystem::path claim_directory(const std::filesystem::path& name);

// Where a run's metrics go.
std::filesystem::path metrics_file(const Options& options, const std::filesystem::path& out_dir);

// What a run writes beside an export.
struct Writes {
    bool checkpoints = true;
    bool record = true;  // run.json and config.toml
    bool metrics = true;
};

// All of it if the run trains. One that only looks at a model saves nothing, and records itself only where it is told to;
// where it looks at a checkpoint (`goes_on`), not over the records of the run that made it.
Writes what_is_written(const Options& options, const std::filesystem::path& out_dir, bool trains,
                       bool goes_on);
// Whether there are such records.
bool holds_records(const Options& options, const std::filesystem::path& out_dir);
// Says that they stay as they are, and what then is not recorded.
std::string records_stay(const Options& options, const std::filesystem::path& out_dir, const Writes& writes);

// UserError if the results (out_dir, --metrics, --export) could not be written, if one would overwrite another or
// one of `inputs`, or if the disk has no room for a checkpoint of `parameters` and the export. Leaves nothing behind.
// The process that writes calls it.
void check_outputs(const Options& options, const std::filesystem::path& out_dir, const Writes& writes,
                   std::span<const std::string> inputs, std::int64_t parameters);

}  // namespace llmc
