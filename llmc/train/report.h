// What a run says of itself: the header before its first step, the record that begins its metrics, the summary
// after its last.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "llmc/data/bpe.h"
#include "llmc/data/data.h"
#include "llmc/device/device.h"
#include "llmc/io/checkpoint.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/algorithms.h"
#include "llmc/train/console.h"
#include "llmc/train/hellaswag.h"
#include "llmc/train/options.h"
#include "llmc/train/outputs.h"

namespace llmc {

// Everything that is known before the first step.
struct Run {
    Options options;
    const Data& data;
    const RunPlan& plan;
    std::filesystem::path out_dir;
    std::string identity;                      // last_run.h
    std::string lineage;                       // the identity of the first run, that this one goes on from
    std::string program;                       // as it was called (command_line.h)
    std::string no_gpu;                        // why it computes on the CPU, if nobody asked for that
    std::optional<CheckpointInfo> checkpoint;  // that it goes on from
    bool trains = true;                        // rather than looking at a model as it is
    Writes writes;
    std::size_t communicator_memory = 0;  // that the device's communicator took (devices.h)
    Algorithms algorithms;
    std::optional<BytePairEncoder> bpe;  // of the vocabulary
    std::vector<std::int32_t> prompt;    // that samples continue
    std::optional<HellaSwag> hellaswag;
};

// What came of it.
struct Outcome {
    std::int64_t steps = 0;  // that this run took
    double seconds = 0;
    std::optional<double> best_loss;  // of validations
    std::int64_t best_step = 0;
    std::filesystem::path checkpoint;  // the last one; empty if there is none
    std::int64_t last_step = 0;        // that was done
    bool stopped = false;              // because the run was asked to

    void see_validation(double loss, std::int64_t step) {
        if (!best_loss || loss < *best_loss) best_loss = loss, best_step = step;
    }
};

Rows header_rows(const Run& run, const Device& device);
// For --verbose: a line for each process with its place in the mesh, its part of the model and its memory.
std::string places_text(const RunPlan& plan);
// "3.2 MiB a step and process", with where that goes; empty if nothing is sent.
std::string sent_text(const RunPlan& plan);
nlohmann::ordered_json run_record(const Run& run, const Device& device);
Rows summary_rows(const Run& run, const Outcome& outcome);
// What to type to go on where the run stopped or, if it is done, as far again; empty without a checkpoint.
std::string command_to_go_on(const Run& run, const Outcome& outcome);
// What to type to export the last checkpoint; empty without one.
std::string command_to_export(const Run& run, const Outcome& outcome);

}  // namespace llmc
