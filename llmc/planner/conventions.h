// Memory by the conventions of lessons and other planners: bytes a parameter, without an architecture. GB is 1e9 bytes.
// They miss activations, padding and workspace; `ours` is what the arenas of a run hold of the state.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/memory_layout.h"
#include "llmc/parallel/zero/store_layout.h"

namespace llmc {

// Bytes a parameter. With Adam the optimizer's include a master copy, where the convention has one.
struct Convention {
    std::string_view name;
    double weights, gradients, optimizer;
    double moments;  // of the optimizer's bytes: Adam's two; SGD with momentum has one
};
// That of this trainer, `ours`, depends on the dtypes of a run; the other conventions do not.
std::vector<std::string> convention_names();
Convention convention_named(std::string_view name, const StoreDtypes& dtypes);

// GB of each kind of state.
struct StateGb {
    double weights = 0, gradients = 0, optimizer = 0, activations = 0;
    double total() const { return weights + gradients + optimizer + activations; }
};

struct ConventionalMemory {
    StateGb whole;    // of the model, undivided
    StateGb per_gpu;  // divided as the stage of ZeRO does, without what is offloaded; activations stay whole
    // The parts that the stage divides, divided: optimizer (1), gradients too (2), everything with activations (3).
    double divided_gb = 0;
    double left_gb = 0;  // of the card's; negative if it lacks them
    // What is offloaded by the GPUs of a machine.
    struct Place {
        double gb = 0;
        std::optional<double> left_gb{};  // of the machine's, if they are known
    } host, disk;
    bool fits = true;
    // The fewest GPUs that hold it with everything but activations divided (stage 3); 0 if none do.
    std::int64_t least_gpus = 0;
};

struct ConventionRequest {
    Convention convention;
    double parameters = 0;
    double activation_gb = 0;
    bool half_weights = false;  // activations of half the weights' bytes instead
    bool uses_sgd = false;
    int zero_stage = 0;
    std::int64_t shards = 1;     // data-parallel ranks that divide the state
    std::int64_t divisions = 1;  // stages times tensor-parallel ranks, which divide all parameters
    double card_gb = 0;          // 0: not known, as below
    // Optimizer state (with the master copy), and weights; gradients stay on the GPU.
    Tier state = Tier::device, weights = Tier::device;
    int gpus_of_machine = 1;
    double host_gb = 0, disk_gb = 0;  // of a machine
};
ConventionalMemory conventional_memory(const ConventionRequest& request);

// Hugging Face Accelerate's estimate-memory, in MiB: the model as AutoModel loads it, the gradients, the backward pass
// and the step, which are the same multiples of the model for every architecture.
struct AccelerateRow {
    double model, gradients, backward, step;
};
// `bytes`: of the weights in fp32, with the buffers that are loaded beside them.
AccelerateRow accelerate_row(double bytes, bool is_fp16);

}  // namespace llmc
