// The files that a run will write. They are checked before training starts, so that a missing directory does
// not end hours of training.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "llmc/io/checkpoint.h"
#include "llmc/train/options.h"

namespace llmc {

// The directory for results: --out-dir, or the run whose checkpoint --resume names. With --resume alone it is
// the newest run in runs/. Otherwise it is a new directory in runs/ with the current time as its name.
std::filesystem::path choose_out_dir(const Options& options);
// The directory of the run whose checkpoints are in this one: the same, or its parent if this is best_folder.
std::filesystem::path run_with(const std::filesystem::path& checkpoints);
// Creates that directory and returns its name. If another run already has it, the next one is created:
// "runs/2026-01-31_12-00-00-2".
std::filesystem::path claim_directory(const std::filesystem::path& name);

// The file for a run's metrics.
std::filesystem::path metrics_file(const Options& options, const std::filesystem::path& out_dir);

// The folder in a run's directory for the checkpoint of --keep-best.
inline constexpr const char* best_folder = "best";

// The files that a run writes in addition to an export.
struct Writes {
    bool checkpoints = true;
    bool record = true;  // run.json and config.toml
    bool metrics = true;
};

// A run that trains writes all of them. A run that only evaluates a model saves no checkpoint, and writes
// records only if the options name a place. If it evaluates a checkpoint (`has_checkpoint`), it does not
// change the records of the run that saved it.
Writes what_is_written(const Options& options, const std::filesystem::path& out_dir, bool trains,
                       bool has_checkpoint);
// Whether the directory or the metrics file already holds records.
bool holds_records(const Options& options, const std::filesystem::path& out_dir);
// A note that the existing records are not changed.
std::string records_stay(const Options& options, const std::filesystem::path& out_dir, const Writes& writes);

// Throws UserError if a new run would write its records into a directory that holds another run, without
// --overwrite. `resumed` is the checkpoint that the run resumes, if it does: one of a run in that directory, or
// the one from which the run there began.
void require_no_other_run(const Options& options, const std::filesystem::path& out_dir, const Writes& writes,
                          const CheckpointInfo* resumed);
// For --overwrite: removes the checkpoints and records of the run in this directory, and no other files.
void remove_run(const std::filesystem::path& out_dir);

// Throws UserError if results (out_dir, --metrics, --export) could not be written, or if one would overwrite
// another or one of `inputs`. Also if the disk has no room for a checkpoint of `parameters` and the export.
// It leaves no files behind. Only rank 0 calls it.
void check_outputs(const Options& options, const std::filesystem::path& out_dir, const Writes& writes,
                   std::span<const std::string> inputs, std::int64_t parameters);

}  // namespace llmc
