// Checkpoints: a directory with all that a run needs to go on bit for bit, visible only when it is whole.
//
//   checkpoint-00000200/
//     model.safetensors      the master weights, as an export
//     optimizer.safetensors  AdamW's moments
//     manifest.json          step, samples consumed, configuration, each file's size and checksum, and its own
//
// It is written under another name, fsynced, and renamed. Nothing in it depends on the number of processes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "llmc/device/device.h"
#include "llmc/parallel/parameter_store.h"
#include "llmc/parallel/unit_transfer.h"

namespace llmc {

// Where a run stands. Everything random and the order of the data follow from it and the seed.
struct Progress {
    std::int64_t step = 0;     // steps done
    std::int64_t samples = 0;  // sequences consumed by them
};

// Writes <out_dir>/checkpoint-<step> and returns its path; one that is there already is replaced. `run` is the
// run's identity (last_run.h), `lineage` that of the first run of those that went on from one another. All ranks
// call it; the transfer's root writes.
std::filesystem::path save_checkpoint(const std::filesystem::path& out_dir, const std::string& run,
                                      const std::string& lineage, const Progress& progress,
                                      const nlohmann::ordered_json& configuration,
                                      const std::string& device_choices, const ParameterStore& store,
                                      UnitTransfer& transfer);

// What a checkpoint's manifest says.
struct CheckpointInfo {
    std::filesystem::path directory;
    std::string run, lineage;
    Progress progress;
    std::string configuration;   // as JSON
    std::int64_t saved_at = 0;   // nanoseconds since 1970
    std::string device_choices;  // Device::choices of the device that trained
};

// Whether a file's name is that of a checkpoint, or of one that is being written.
bool is_checkpoint_name(std::string_view name);

// About what a checkpoint of so many parameters takes on the disk, and the weights of it alone.
std::uint64_t checkpoint_bytes(std::int64_t parameters);
std::uint64_t weights_bytes(std::int64_t parameters);

// UserError if the directory is no whole checkpoint. Reads the manifest only.
CheckpointInfo read_checkpoint(const std::filesystem::path& directory);

// The checkpoint of `out_dir` that was saved last, of this run if one is given; nothing if there is none. UserError if
// a damaged one stands after a later step, or alone.
std::optional<CheckpointInfo> newest_checkpoint(const std::filesystem::path& out_dir,
                                                const std::optional<std::string>& run);

// Of those in the directory that are whole, with the checksums of all their files, the one that was saved last; nothing
// if there is none.
std::optional<CheckpointInfo> newest_whole_checkpoint(const std::filesystem::path& out_dir);

// Verifies the files' sizes and checksums and loads them, or the weights alone; UserError names what is damaged or of another
// model. All ranks call it; the transfer's root reads.
void load_checkpoint(const CheckpointInfo& checkpoint, Device& device, ParameterStore& store,
                     UnitTransfer& transfer, bool with_moments = true);

}  // namespace llmc
