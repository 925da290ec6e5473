// The machines of a planned run, and how fast they are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/device/gpu_table.h"
#include "llmc/device/sizes.h"
#include "llmc/plan/step_time.h"
#include "llmc/planner/plan_options.h"
#include "llmc/train/options.h"

namespace llmc {

// The machines of a planned run.
struct PlannedMachines {
    std::optional<GpuModel> gpu;  // with the values that options override; none: CPUs
    int nodes = 1, ranks_of_node = 1;
    double host_bytes = 0, nvme_bytes = 0;  // of a node; 0: not known
    double nvme_read = 0, nvme_write = 0;   // bytes/s of a node's disks
    // The memory of a rank for its arenas: on a GPU what a process sees, less --reserve. 0: not known.
    std::size_t usable = 0;
    // The same of the host's memory beside a GPU, and of the disks.
    std::size_t usable_host() const { return gpu ? share_of(host_bytes) : 0; }
    std::size_t usable_disk() const { return share_of(nvme_bytes); }
    std::size_t share_of(double bytes) const {
        return bytes > 0 ? std::max<std::size_t>(1, static_cast<std::size_t>(bytes / ranks_of_node)) : 0;
    }
    std::unique_ptr<DeviceSizes> sizes;
};

// The names in --gpu.
std::vector<std::string> gpu_names(const PlanOptions& asked);

// One of the table. UserError that lists them, for another name.
const GpuModel& known_gpu(const std::string& name);

// Those that the options name (the first, of several), for so many processes in all. UserError for an unknown GPU.
PlannedMachines machines_of(const PlanOptions& asked, const Options& options, int ranks,
                            std::vector<std::string>& notes);

// The makers' peaks.
StepRates peak_rates(const PlannedMachines& machines, DType dtype, bool uses_tf32);
// The rates that benchmarks reach (ml-engineering's, of 2026): products of large matrices 271 of 312 TFLOP/s on A100
// and 794 of 989 on H100, 1403 of 1979 there in 8 bits, FlashAttention-2's 155 and 330, rings 0.8 of NVLink,
// all-reduces over several machines 0.73 of the network; NCCL's latencies. Published steps take longer than these say,
// by published_times.h.
StepRates expected_rates(const PlannedMachines& machines, DType dtype, bool uses_tf32, bool is_fp8);

}  // namespace llmc
