// The files that a run will write. They are checked before training starts, so that a missing directory does
// not end hours of training.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/io/checkpoint.h"
#include "llmc/train/options.h"

namespace llmc {

// The directory for results: --out-dir, or the run whose checkpoint --resume names. With --resume alone it is
// the newest run in runs/. Otherwise it is a new directory in runs/ with the current time as its name.
std::filesystem::path choose_out_dir(const Options& options);
// The directory of the run that saved a checkpoint. The checkpoint is in it, or in its best_folder.
std::filesystem::path directory_of_run(const std::filesystem::path& checkpoint);
// Whether a run saves its checkpoints where this one is.
bool is_of_run(const std::filesystem::path& checkpoint, const std::filesystem::path& out_dir);
// Creates that directory and returns its name. If another run already has it, the next one is created:
// "runs/2026-01-31_12-00-00-2".
std::filesystem::path claim_directory(const std::filesystem::path& name);

// The file in a run's directory whose lock a start holds while it writes there (run_locks.h).
inline constexpr const char* lock_file = "run.lock";

// The file for a run's metrics.
std::filesystem::path metrics_file(const Options& options, const std::filesystem::path& out_dir);

// The folder in a run's directory for the checkpoint of --keep-best. A folder of this name that holds a run is not
// meant.
inline constexpr const char* best_folder = "best";
// The checkpoint there; empty if there is none with weights.
std::optional<CheckpointInfo> best_checkpoint(const std::filesystem::path& out_dir);

// The newest checkpoint of a run's directory, or that of --keep-best if it is newer and of another step.
// `run` and `damages` as for newest_checkpoint().
std::optional<CheckpointInfo> newest_of_run(const std::filesystem::path& out_dir,
                                            const std::optional<std::string>& run,
                                            const Damages& damages = {});

// The files that a run writes in addition to an export.
struct Writes {
    bool checkpoints = true;
    bool record = true;  // run.json and config.toml
    bool metrics = true;

    // Whether one of them lies in the run's directory.
    bool into_folder(const Options& options) const {
        return checkpoints || record || (metrics && options.metrics.empty());
    }
};

// Whether the run has a step to train, from the checkpoint that it resumes if there is one.
bool has_steps_to_train(const Options& options, const std::optional<CheckpointInfo>& checkpoint);

// A run that trains writes all of them. A run that only evaluates a model saves no checkpoint, and writes
// records only if the options name a place. If it evaluates a checkpoint (`has_checkpoint`), it does not
// change the records of the run that saved it.
Writes what_is_written(const Options& options, const std::filesystem::path& out_dir, bool trains,
                       bool has_checkpoint);
// Whether a directory holds a run's record or configuration.
bool holds_run(const std::filesystem::path& out_dir);
// Whether it holds a run, or the metrics file holds steps.
bool holds_records(const Options& options, const std::filesystem::path& out_dir);
// A note that the existing records are not changed.
std::string records_stay(const Options& options, const std::filesystem::path& out_dir, const Writes& writes);

// Throws UserError if this is a checkpoint, or the folder of a run's best one.
void require_no_checkpoint(const std::filesystem::path& out_dir);
// Throws UserError if a new run would write its records into a directory that holds another run, without
// --overwrite. `resumed` is the checkpoint that the run resumes, if it does: one of a run in that directory, or
// the one from which the run there began.
void require_no_other_run(const Options& options, const std::filesystem::path& out_dir, const Writes& writes,
                          const CheckpointInfo* resumed);
// For --overwrite: sets the checkpoints and records of the run in this directory aside, and no other files. They
// return, unless remove() is called when the new run has written its own records. UserError if that fails.
class ReplacedRun {
  public:
    explicit ReplacedRun(const std::filesystem::path& out_dir);
    ~ReplacedRun();
    ReplacedRun(const ReplacedRun&) = delete;
    ReplacedRun& operator=(const ReplacedRun&) = delete;

    void remove();

  private:
    void set_aside(const std::filesystem::path& name);
    void put_back();
    void remove_empty_folders();

    std::filesystem::path out_dir_, aside_;
    std::vector<std::filesystem::path> names_;  // relative to both
};

// Throws UserError if results (out_dir, --metrics, --export) could not be written, or if one would overwrite
// another or one of `inputs`. Also if the disk has no room for a checkpoint and the export of so many bytes.
// It leaves no files behind. Only rank 0 calls it.
void check_outputs(const Options& options, const std::filesystem::path& out_dir, const Writes& writes,
                   std::span<const std::string> inputs, const SavedBytes& bytes);
// Throws UserError if not all processes see the directory of rank 0, in which all write checkpoints. Leaves nothing
// behind. All ranks call it.
void require_shared_directory(Communicator& world, const std::filesystem::path& out_dir);
// Throws UserError if the disk has no room for a checkpoint of so many bytes.
void require_room_for_checkpoints(const Options& options, const std::filesystem::path& out_dir,
                                  const Writes& writes, const SavedBytes& bytes);

}  // namespace llmc
