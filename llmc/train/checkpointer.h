// Saves a run: checkpoints during training, and at the end the weights of --export, under Hugging Face's
// tensor names.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/io/checkpoint.h"
#include "llmc/train/background_save.h"
#include "llmc/train/prepared_run.h"

namespace llmc {

// --verify-checkpoint: rank 0 reads the checkpoint, and prints a line. UserError if it is damaged.
void verify_in_job(Session& session);

class Checkpointer {
  public:
    // The run outlives it. Removes what interrupted saves of the run have left.
    explicit Checkpointer(PreparedRun& run);
    ~Checkpointer() { run_.trainer->before_errors({}); }
    Checkpointer(const Checkpointer&) = delete;
    Checkpointer& operator=(const Checkpointer&) = delete;

    // Saves a checkpoint of the weights and the optimizer state as they are: beside training, if the run has memory for
    // a copy and goes on, and otherwise before it returns. UserError if a number is not finite, or a file cannot be
    // written, also that of the checkpoint before; earlier checkpoints stay. All ranks call the functions.
    void save();
    // The same checkpoint in the folder `best` of the run, in the place of the one there, with the loss of its
    // validation.
    void save_best(double validation_loss);
    // Whether a signal has asked any rank to stop (Session::ask_to_stop). Asks also whether all have written what is
    // being saved.
    bool ask_to_stop();
    // Waits until what is being saved is complete.
    void finish();
    // The same after an error, which is thrown again, if all ranks found it.
    void finish_after(const UserError& fault);
    // The file of --export, if one is asked for. If it cannot be written, the error message contains the
    // command that exports the last checkpoint.
    void export_weights();

    // The last checkpoint in the run's directory; empty if there is none.
    const std::filesystem::path& last() const { return last_; }
    // The last one of save_best(); empty if there is none.
    const std::filesystem::path& best() const { return best_; }

  private:
    void save_in(const std::filesystem::path& folder, const std::optional<Validation>& validation = {});
    // As finish(), without its error: another one ends the run.
    void settle();
    // What is to be done once a checkpoint is complete.
    void see_saved(const std::filesystem::path& checkpoint, std::int64_t step, bool is_best);
    // Calls f with the save beside training, which it forgets if that is complete, or failed.
    template <class F>
    void advance_pending(const F& f);
    // Calls f, and adds to its error what would do.
    template <class F>
    void advising(const F& f) const;

    PreparedRun& run_;
    std::filesystem::path last_, best_;
    std::optional<CheckpointLink> previous_;   // the last one that is not the best
    std::vector<std::filesystem::path> kept_;  // with --keep-last, on rank 0: those up to it
    std::optional<BackgroundSave> pending_;
};

}  // namespace llmc
