// The checkpoint that a run resumes from, and the settings that differ from the run that saved it.
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
#include "llmc/train/sources.h"

namespace llmc {

// Calls `resume`. If that throws a UserError, adds to the message the newest complete checkpoint in out_dir,
// or in the directory of the one that --resume names.
void suggesting_complete_checkpoint(const Options& options, const std::filesystem::path& out_dir,
                                    const std::function<void()>& resume);

// Reads all files of the checkpoint in a directory, or of the newest one of a run there, for --verify-checkpoint. Says
// what there is. UserError names a file that is damaged.
std::string verified(const std::filesystem::path& directory);

// The checkpoint for --resume, or nothing without that option. --resume DIR must name a checkpoint. --resume
// alone takes the newest checkpoint that the last run in out_dir saved, else the one that it resumed from,
// else the newest checkpoint of any run in out_dir, else nothing.
std::optional<CheckpointInfo> find_checkpoint(const Options& options, const std::filesystem::path& out_dir);

// The newest checkpoint of the last run in a directory, or the one from which that run began. Those of `damages` are
// passed over.
std::optional<CheckpointInfo> newest_of_last_run(const std::filesystem::path& out_dir,
                                                 const Damages& damages = {});

// A run that resumes takes from its checkpoint what was not given: the model, the settings that change the
// results, and when it validates, samples and saves. It then goes on as it began, on any mesh. An evaluation
// takes the model, the data and the dtype.
void take_checkpoint(Options& options, const Sources& sources);

// Sets the --model of a checkpoint's run and its sizes and switches, except those that were given. Changes
// nothing and returns false if another --model was given.
bool take_model(Options& options, const CheckpointInfo& checkpoint);

// The --model of the checkpoint's run. Throws UserError if this program does not know it.
std::string model_of(const CheckpointInfo& checkpoint);

// The options with which a run that has applied `step` steps goes on at the same learning rate, as
// " --lr-schedule constant --lr 4e-04". Empty if its schedule is constant.
std::string options_that_keep_rate(const Options& options, std::int64_t step);

// Throws UserError if the checkpoint has another model.
void require_same_model(const CheckpointInfo& checkpoint, const Options& options);

// Throws UserError if the checkpoint has another model or is beyond the last step. Otherwise returns a note
// for each other setting that changes how training continues.
std::vector<std::string> differences(const CheckpointInfo& checkpoint, const Options& options);

// Whether the run scales its gradients otherwise than the checkpoint's. That one's skipped steps in a row say nothing
// about this one then.
bool scales_otherwise(const CheckpointInfo& checkpoint, const Options& options);

// Whether all ranks are at the same step.
bool is_same_step(Communicator& world, std::int64_t step);
// Throws UserError if they are not, as happens if they do not see the same files.
void require_same_step(Communicator& world, std::int64_t step);

}  // namespace llmc
