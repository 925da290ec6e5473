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
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

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

// Writes <out_dir>/checkpoint-<step> and returns its path; an existing one is replaced. `run` is the identity
// of this run (RunRecord below). `lineage` is the identity of the first run in the chain of resumed runs.
// `data` describes the data of the run as JSON. `validation` is of the same step. All ranks call it. UserError on all
// of them if one cannot write; earlier checkpoints then stay.
std::filesystem::path save_checkpoint(const std::filesystem::path& out_dir, const std::string& run,
                                      const std::string& lineage, const Progress& progress,
                                      const nlohmann::ordered_json& configuration, const std::string& data,
                                      const std::string& device_choices, const ParameterStore& store,
                                      const UnitTransfer& transfer, const TokenizerFiles& tokenizer = {},
                                      const std::optional<Validation>& validation = {});

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
};

// The name of a step's checkpoint, and its ending until it is finished. Other names in a directory belong to the user.
std::string checkpoint_name(std::int64_t step);
inline constexpr std::string_view partial_suffix = ".partial";
// Whether a file's name is that of a checkpoint, finished or not.
bool is_checkpoint_name(std::string_view name);

// The approximate disk space of the weights of this number of parameters, and of a whole checkpoint.
inline std::uint64_t weights_bytes(std::int64_t parameters) {
    return sizeof(float) * static_cast<std::uint64_t>(parameters);
}
inline std::uint64_t checkpoint_bytes(std::int64_t parameters, const Optimizer& optimizer) {
    return (1 + most_states_of(optimizer)) * weights_bytes(parameters);
}

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

// The checkpoints of a directory whose manifests can be read, the newest first.
std::vector<CheckpointInfo> readable_checkpoints(const std::filesystem::path& out_dir);

// Removes all checkpoints of a directory but `kept`.
void remove_checkpoints(const std::filesystem::path& directory, const std::filesystem::path& kept);

// The newest of these checkpoints whose files all match their checksums. Empty if there is none.
std::optional<CheckpointInfo> newest_whole(const std::vector<CheckpointInfo>& checkpoints);

// The folder with the tokenizer of a checkpoint; empty if it has none. UserError if a file of it is damaged.
std::filesystem::path tokenizer_in(const CheckpointInfo& checkpoint);

// The weights of a checkpoint, if the path is that of one; else those of a file or of another folder (find_tensors).
StoredTensors find_weights(const std::filesystem::path& path);
// Whether a directory has files of a checkpoint's weights.
bool has_weights(const std::filesystem::path& directory);

// Loads the weights, and the optimizer's state too if `with_state`, and verifies the checksums of all files that it
// reads. UserError names a damaged file or one of another model. All ranks call it, and all get the same error.
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
