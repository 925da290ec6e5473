// Checkpoints: a directory with all that a run needs to resume bit for bit. It is visible only when it is
// whole.
//
//   checkpoint-00000200/
//     weights-00000-1.safetensors, state-00000-1.safetensors, ...
//                         master weights and the optimizer's state, in the files of each rank (own_files.h)
//     checksums-00000.json, ...
//                         the checksums of a rank's files
//     tokenizer/          the files of the model's tokenizer, if it has one
//     manifest.json       step, samples consumed, configuration, the checksums of the two above, and the
//                         manifest's own checksum
//
// Each rank writes what it has under another name of the directory, all is fsynced, and the directory is renamed. Any
// mesh can load it. Checkpoints of version 2, with model.safetensors and optimizer.safetensors, can be loaded too.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/io/own_files.h"
#include "llmc/io/stored_tensors.h"
#include "llmc/io/tokenizer_folder.h"
#include "llmc/parallel/zero/parameter_store.h"
#include "llmc/parallel/zero/unit_transfer.h"

namespace llmc {

// The state of fp16's loss scaling (train/loss_scale.h).
struct LossScale {
    std::int64_t scale = 1;
    std::int64_t good_steps = 0;       // since it changed
    std::int64_t hysteresis_left = 1;  // overflows until it is halved
};

// The state of delayed scaling in fp8 (train/fp8_scaling.h): for each operand of a product, the greatest magnitude by
// which it is scaled, and those of the last steps, the latest last.
struct Fp8History {
    std::vector<float> amax;
    std::vector<std::vector<float>> seen;
};

// The progress of a run. Together with the seed it determines all random numbers and the order of the data.
struct Progress {
    std::int64_t step = 0;     // steps done
    std::int64_t samples = 0;  // sequences that these steps consumed
    std::int64_t skipped = 0;  // the steps of these that changed nothing, since the gradient overflowed
    std::int64_t skipped_in_a_row = 0;  // the last of the steps
    std::optional<LossScale> loss_scale{};
    std::optional<Fp8History> fp8{};

    std::int64_t applied() const { return step - skipped; }
};

// A validation: its loss in nats per token, and the fingerprint of the windows (ValidationWindows).
struct Validation {
    double loss = 0;
    std::string windows;
};

// Names a checkpoint of a folder.
struct CheckpointLink {
    std::string run;
    std::int64_t step = 0;
    bool operator==(const CheckpointLink&) const = default;
};

// The weights beside which a checkpoint's adapters were trained.
struct BaseWeights {
    std::string weights;   // the file or folder, absolute
    std::string checksum;  // load_stored
};

// What a checkpoint has beside weights and state.
struct CheckpointContents {
    std::string run;      // the identity of this run (RunRecord below)
    std::string lineage;  // the identity of the first run in the chain of resumed runs
    Progress progress;
    std::string configuration, data;  // of the run, as JSON
    std::string device_choices;       // Device::choices of the device used for training
    TokenizerFiles tokenizer{};
    std::optional<Validation> validation{};  // of the same step
    std::optional<CheckpointLink>
        previous{};  // the one before it in the folder, of this run or those it goes on with
    std::optional<BaseWeights> base{};  // if the model has adapters, which alone are saved
};

// A checkpoint that is being saved, in these steps. Errors leave the earlier checkpoints.
class CheckpointSave {
  public:
    // Makes the folder's temporary name for <out_dir>/checkpoint-<step>. All ranks make one; UserError on all of them.
    CheckpointSave(const std::filesystem::path& out_dir, CheckpointContents contents,
                   const ParameterStore& store, const UnitTransfer& transfer);

    const CheckpointContents& contents() const { return contents_; }
    // Its path when it is complete.
    const std::filesystem::path& path() const { return path_; }
    // Writes this rank's files. Communicates with no rank, so that a thread can call it.
    void write(const ReadKept& read);
    // When all ranks have written. All ranks call it.
    void gather(Communicator& world);
    // Rank 0 completes the checkpoint, and replaces an existing one. Communicates with no rank.
    void complete() const;
    // Rank 0 removes what was written.
    void abandon() const;

  private:
    CheckpointContents contents_;
    bool is_root_;
    int rank_;
    std::filesystem::path path_, partial_;
    std::vector<OwnFile> files_;
    SealedFile own_{};
    std::vector<SealedFile> sealed_;
};

// All steps, and returns the path. All ranks call it. UserError on all of them if one cannot write.
std::filesystem::path save_checkpoint(const std::filesystem::path& out_dir, CheckpointContents contents,
                                      const ParameterStore& store, const UnitTransfer& transfer);

// The contents of a checkpoint's manifest.
struct CheckpointInfo {
    std::filesystem::path directory;
    int version = 0;
    std::string run, lineage;
    Progress progress;
    std::string configuration;   // as JSON
    std::int64_t saved_at = 0;   // nanoseconds since 1970
    std::string device_choices;  // Device::choices of the device used for training
    std::string data;            // as JSON (data/data_record.h); empty in a checkpoint of version 0.1
    std::optional<Validation> validation{};
    std::optional<CheckpointLink> previous{};
    std::optional<BaseWeights> base{};
};

// The name of a step's checkpoint, and its ending until it is finished. Other names in a directory belong to the user.
std::string checkpoint_name(std::int64_t step);
inline constexpr std::string_view partial_suffix = ".partial";
// Whether a file's name is that of a checkpoint, finished or not.
bool is_checkpoint_name(std::string_view name);

// The disk space of the tensors of a checkpoint, and of weights or adapters that are exported in fp32.
struct SavedBytes {
    std::uint64_t checkpoint = 0, weights = 0, adapters = 0;
};
SavedBytes saved_bytes(const Outline& outline, const StoreDtypes& dtypes);

// UserError if the directory is not a complete checkpoint. Reads only the manifest.
CheckpointInfo read_checkpoint(const std::filesystem::path& directory);

// Sorts checkpoints, the newest first. Steps tell the order of those that one start of the program saved, since a
// clock may be set back. The times of their last steps tell the order of starts.
void sort_newest_first(std::vector<CheckpointInfo>& checkpoints);

// The errors of damaged checkpoints, by their folders (plain_path). Each begins so.
using Damages = std::map<std::string, std::string>;
inline constexpr std::string_view damage_prefix = "the checkpoint is damaged: ";

// The newest checkpoint of `out_dir`, only among those of `run` if it is given. Those of `damages`, and those whose
// manifests cannot be read, are passed over. Empty if there is none. UserError if all are damaged.
std::optional<CheckpointInfo> newest_checkpoint(const std::filesystem::path& out_dir,
                                                const std::optional<std::string>& run,
                                                const Damages& damages = {});
// The error of the newest checkpoint of a later step that is passed over; empty if there is none.
std::string damage_after(const std::filesystem::path& out_dir, std::int64_t step, const Damages& damages);

// What is damaged in a checkpoint, all of which it reads; empty if it is whole.
std::string damage_of(const std::filesystem::path& directory);

// The checkpoints of a directory whose manifests can be read, the newest first.
std::vector<CheckpointInfo> readable_checkpoints(const std::filesystem::path& out_dir);

// Removes all checkpoints of a directory but `kept`.
void remove_checkpoints(const std::filesystem::path& directory, const std::filesystem::path& kept);
void remove_checkpoint(const std::filesystem::path& path);
// Those of a directory up to this one in the order of steps: each is the previous one of the next. They begin after one
// that is gone.
std::vector<std::filesystem::path> checkpoints_up_to(const std::filesystem::path& directory,
                                                     std::optional<CheckpointLink> last);
// Removes what saves that were interrupted have left.
void remove_partial_checkpoints(const std::filesystem::path& directory);

// The newest of these checkpoints whose files all match their checksums. Empty if there is none.
std::optional<CheckpointInfo> newest_whole(const std::vector<CheckpointInfo>& checkpoints);

// The folder with the tokenizer of a checkpoint; empty if it has none. UserError if a file of it is damaged.
std::filesystem::path tokenizer_in(const CheckpointInfo& checkpoint);

// The weights of a checkpoint, if the path is that of one; else those of a file or of another folder (find_tensors).
StoredTensors find_weights(const std::filesystem::path& path);
// Whether a directory has files of a checkpoint's weights.
bool has_weights(const std::filesystem::path& directory);

// Loads the weights, and the optimizer's state too if `with_state`, and verifies the checksums of all files that it
// reads. SharedError names a damaged file or one of another model. All ranks call it.
void load_checkpoint(const CheckpointInfo& checkpoint, ParameterStore& store, const UnitTransfer& transfer,
                     bool with_state = true);

// Reads all files of a checkpoint. UserError names one that is damaged, or tensors that are not whole.
struct VerifiedCheckpoint {
    std::int64_t step = 0, files = 0;
    std::uint64_t bytes = 0;
};
VerifiedCheckpoint verify_checkpoint(const std::filesystem::path& directory);

// The last run of a directory of results. Every start of the program is a run of its own, which records the
// checkpoint it began from. With this record, --resume takes neither the checkpoint of an earlier run in the
// same directory nor one of an abandoned branch.

// A random identity.
std::string new_run_identity();

struct RunRecord {
    std::string identity;
    std::filesystem::path began_from;  // a checkpoint; empty if the run did not resume
    // The checkpoint of another directory from which the runs of this one go on; empty if they began here.
    std::filesystem::path branched_from;
};

// The contents of a directory's run.json; empty if there is none. UserError if it is damaged.
std::optional<RunRecord> read_last_run(const std::filesystem::path& out_dir);
void write_last_run(const std::filesystem::path& out_dir, const RunRecord& run);

}  // namespace llmc
