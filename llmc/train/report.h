// The texts of a run: the header before its first step, the summary after its last step, and what is shown
// instead of a run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/core/scratch_file.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/console.h"
#include "llmc/train/options.h"

namespace llmc {

struct PreparedRun;

// The lowest validation loss, and the step after which it was measured.
struct BestLoss {
    double loss = 0;
    std::int64_t step = 0;
};

// The results of a run.
struct Outcome {
    std::int64_t steps = 0;  // steps that this run took
    double seconds = 0;
    std::optional<BestLoss> best;           // the best validation loss
    std::filesystem::path checkpoint;       // the last one; empty if there is none
    std::filesystem::path best_checkpoint;  // that of --keep-best; empty if this run saved none
    std::int64_t last_step = 0;             // the last step that was done
    bool stopped = false;                   // whether the run ended because it was asked to
};

Rows header_rows(const PreparedRun& run);
// For --verbose: a line for each process with its coordinates in the mesh, its part of the model and its memory.
std::string places_text(const RunPlan& plan);
// "3.2 MiB per step and process", and to which ranks; empty if nothing is sent.
std::string sent_text(std::span<const StageNeeds> stages);
// "28.1 GiB per process", and the bytes of each arena on the stage that needs most.
std::string memory_text(const Mesh& mesh, std::span<const StageNeeds> stages,
                        ArenaSizes StageNeeds::*memory = &StageNeeds::memory);
// On CPUs: a sentence about each --offload-* cpu.
std::vector<std::string> offload_without_effect(const Options& options);
// The speed of the disk, what it makes of a step, and how long a drive lasts.
std::string disk_note(const RunPlan& plan, const ScratchFile::Speed& speed);
Rows summary_rows(const PreparedRun& run, const Outcome& outcome);
// --print-model: the model of a run as text (model_report.cpp).
//
// Lists the parts, the parameters with this mesh's shards, and the operations. For each operation it gives
// the activations that are kept or recomputed, the FLOPs and the bytes sent, for one sequence. Any size is
// accepted, however large; then the text says why a step of it cannot be made.
std::string model_text(const RunSpec& spec, const DeviceSizes& sizes);

}  // namespace llmc
