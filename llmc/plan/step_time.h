// How long a step takes, from the lists of all stages: each action has floating-point operations, bytes of memory
// and bytes to other ranks, and runs when the executor would run it. A bound takes the makers' peaks, and hides
// whatever may run at the same time; an expectation takes measured rates, the tiles of products, and latencies.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include "llmc/plan/run_plan.h"

namespace llmc {

// A link between ranks: bytes/s of a rank in one direction, and the seconds of a message.
struct LinkRate {
    double bytes = 0, latency = 0;
};

// The parts of the time of a stage's compute stream: its passes by kind of call, and what it waits for.
enum class TimePart {
    products,
    attention,
    other /* operations of the passes, which memory limits */,
    tensor_exchange /* of tensor-parallel ranks */,
    recompute,
    update /* and what prepares the gradients for it */,
    data_exchange /* waits: for gathers and sums over data-parallel ranks */,
    stages,
    host,
    disk,
};
inline constexpr std::size_t time_parts = 10;
std::string_view name_of(TimePart part);

// Seconds of each part.
struct TimeParts {
    std::array<double, time_parts> of{};
    double& operator[](TimePart part) { return of[static_cast<std::size_t>(part)]; }
    double operator[](TimePart part) const { return of[static_cast<std::size_t>(part)]; }
    double total() const { return std::accumulate(of.begin(), of.end(), 0.0); }
};

// The rates of one GPU and its links.
struct StepRates {
    double products = 0;      // FLOP/s of matrix products
    double fp8_products = 0;  // and of those in 8 bits
    double attention = 0;     // FLOP/s of the products in attention
    double memory = 0;        // bytes/s
    double launch = 0;        // seconds of a kernel, at least
    int multiprocessors = 0;  // for the share that tiles leave idle; 0: none
    LinkRate node, network;
    // bytes/s of what is offloaded, for one rank: of the link to the host in each direction, of its share of the host's
    // memory, and of its share of the disks. 0: not known, and counted as nothing.
    double host_link = 0, host_memory = 0, disk_read = 0, disk_write = 0;
    int ranks_of_node = 1;
    // How many times as long each part takes as these rates say; for exchanges of tensor-parallel ranks, below 1, the
    // share that products do not hide. Recomputation takes those of what it recomputes.
    TimeParts times{{1, 1, 1, 1, 1, 1, 1, 1, 1, 1}};
    bool is_bound = false;  // collectives on two levels take the slower one, not half of the other too
};

struct StepTime {
    double seconds = 0;
    double compute = 0;  // of the stage that computes longest
    TimeParts parts{};   // of that stage; they add up to `seconds`
};

// All-gather or reduce-scatter of `whole` bytes over `size` ranks that are `distance` apart.
double gather_seconds(double whole, int size, int distance, const StepRates& rates);

// The time of a call of a part's list, on one rank of a tensor-parallel group.
TimeParts call_time(const ListCall& call, const PartSizes& sizes, const Mesh& mesh, const StepRates& rates);

// The time of a micro-batch on one rank that has the whole model, or its part of every layer (`spec` has no stages):
// its forward pass, its backward pass with what it recomputes, and the memory of its activations.
struct ModelTime {
    double forward = 0, backward = 0;
    std::size_t activation_bytes = 0;
};
ModelTime model_time(const RunSpec& spec, const DeviceSizes& sizes, const StepRates& rates);

// The time of a step at these rates.
StepTime step_time(const ShortPlans& plans, const StepRates& rates);

}  // namespace llmc
