// Saves a run: checkpoints during training, and at the end the weights of --export, under Hugging Face's
// tensor names.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "llmc/io/checkpoint.h"
#include "llmc/train/prepared_run.h"

namespace llmc {

// --verify-checkpoint: rank 0 reads the checkpoint, and prints a line. UserError if it is damaged.
void verify_in_job(Session& session);

class Checkpointer {
  public:
    // The run outlives it.
    explicit Checkpointer(PreparedRun& run);

    // A checkpoint of the weights and the optimizer state as they are. UserError if a number is not finite,
    // or a file cannot be written; earlier checkpoints stay. All ranks call save() and export_weights().
    void save();
    // The same checkpoint in the folder `best` of the run, in the place of the one there, with the loss of its
    // validation.
    void save_best(double validation_loss);
    // The file of --export, if one is asked for. If it cannot be written, the error message contains the
    // command that exports the last checkpoint.
    void export_weights();

    // The last checkpoint in the run's directory; empty if there is none.
    const std::filesystem::path& last() const { return last_; }
    // The last one of save_best(); empty if there is none.
    const std::filesystem::path& best() const { return best_; }

  private:
    std::filesystem::path save_in(const std::filesystem::path& folder,
                                  const std::optional<Validation>& validation = {});

    PreparedRun& run_;
    std::filesystem::path last_, best_;
};

}  // namespace llmc
