// Which checkpoint a run goes on from, and what then differs from the run that saved it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/io/checkpoint.h"
#include "llmc/train/options.h"

namespace llmc {

// A UserError of `resume` ends with how to resume from the newest whole checkpoint, of those in out_dir or beside the one
// that --resume names, if there is one.
void naming_a_whole_one(const Options& options, const std::filesystem::path& out_dir,
                        const std::function<void()>& resume);

// What --resume asks for: a directory, which must be a checkpoint; alone, the newest that the last run in out_dir
// saved or else the one it went on from, nothing if there is neither; nothing without --resume.
std::optional<CheckpointInfo> find_checkpoint(const Options& options, const std::filesystem::path& out_dir);

// --resume DIR may name a run's directory: it becomes what --resume alone finds there.
void settle_resume(Options& options);

// The --model that a checkpoint's run began with; UserError for one that this program does not know.
std::string model_of(const CheckpointInfo& checkpoint);

// UserError if the checkpoint is of another model or beyond the last step. Otherwise a line for each other setting that makes the run
// go on differently from how it began.
std::vector<std::string> differences(const CheckpointInfo& checkpoint, const Options& options);

// UserError if ranks do not stand at the same step, as happens where they do not see the same files.
void require_same_step(Communicator& world, std::int64_t step);

}  // namespace llmc
