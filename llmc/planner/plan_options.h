// The options that `./train_gpt plan` has besides those of a run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "llmc/train/options.h"

namespace llmc {

// GiB of a GPU for CUDA's context, its libraries and NCCL; a search leaves more, since no plan knows these exactly.
inline constexpr double reserve_of_plan = 1, reserve_of_search = 2;

struct PlanOptions {
    std::string gpu;  // a name (device/gpu_table.h), or several with commas; empty: not given
    std::optional<std::int64_t> gpus, processes,
        nodes;  // two names of one number: the processes of the run in all
    std::optional<double> gpu_gib, gpu_tflops, gpu_bandwidth;  // GiB that a process sees; bf16; 1e9 bytes/s
    std::optional<double> network;                             // 1e9 bytes/s of a GPU, one direction
    std::optional<double>
        reserve_gib;  // of a GPU's memory, for what is not the run's; not given: by reserve()
    std::optional<double> host_bytes, nvme_bytes;  // of a node
    std::optional<double> nvme_read, nvme_write;   // 1e9 bytes/s of a node's disks
    std::optional<double> tokens, price, speed,
        lost;                          // of the run; USD an hour; tokens/s of a GPU; a fraction
    std::optional<double> parameters;  // of a nominal size, without an architecture
    std::string convention = "ours", activations = "none", optimizer = "adam";
    bool json = false, search = false, levers = false;
    std::optional<double> days;  // in which the run must end
    // --measured: a run's folder, the seconds of a step, or "x" and how many times as long as planned a step takes.
    std::string measured;
    std::optional<double> measured_seconds() const, measured_ratio() const;
    double reserve() const;    // GiB
    std::string from, config;  // the files of --from (foreign_options.h) and of --write-config
};

// The command that has them, with what it writes into `options`, which must outlive it. Values that are out of range
// are refused as the options of a run are.
OtherCommand plan_command_line(PlanOptions& options);
// The words of a command line that belong to the run, without the options above and their values.
std::vector<std::string> words_of_run(const std::vector<std::string>& arguments);

}  // namespace llmc
