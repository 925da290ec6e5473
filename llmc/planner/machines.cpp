#include "llmc/planner/machines.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <sstream>
#include <string_view>
#include <utility>

#include "llmc/comm/bootstrap.h"
#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/device/device.h"
#include "llmc/device/gpu_sizes.h"
#include "llmc/planner/published_times.h"

namespace llmc {

namespace {

constexpr double gib = 1 << 30;

// The sizes of the CPU device, which belong to a device.
class CpuSizes final : public DeviceSizes {
  public:
    explicit CpuSizes(int threads) : device_(make_cpu_device(threads)) {}

    std::size_t workspace_bytes(const WorkspaceRequest& request) const override {
        return device_->sizes().workspace_bytes(request);
    }
    DType fp8_dtype() const override { return device_->sizes().fp8_dtype(); }
    std::int64_t default_micro_batch_tokens() const override {
        return device_->sizes().default_micro_batch_tokens();
    }
    std::int64_t default_logits_bytes() const override { return device_->sizes().default_logits_bytes(); }
    std::size_t available_memory() const { return device_->available_memory(); }

  private:
    std::unique_ptr<Device> device_;
};

int ceiling(std::int64_t n, std::int64_t size) { return static_cast<int>((n + size - 1) / size); }

}  // namespace

const GpuModel& known_gpu(const std::string& name) {
    if (const GpuModel* const known = gpu_named(name)) return *known;
    std::vector<std::string_view> names;
    for (const GpuModel& gpu : known_gpus())
        if (names.empty() || names.back() != gpu.name) names.push_back(gpu.name);
    user_error(
        "--gpu {}: unknown GPU; choose one of: {}; or describe it by --gpu-memory, --gpu-tflops and "
        "--gpu-bandwidth",
        one_line(name), fmt::join(names, ", "));
}

namespace {

// The GPU that the options name, with the values that they override; none: CPUs.
std::optional<GpuModel> chosen_gpu(const PlanOptions& asked, const Options& options,
                                   std::vector<std::string>& notes) {
    const bool describes = asked.gpu_gib || asked.gpu_tflops || asked.gpu_bandwidth;
    const bool is_cpu = options.device == "cpu";
    if (is_cpu && (describes || !asked.gpu.empty()))
        user_error("--device cpu: --{} describes a GPU; leave one of them out", !asked.gpu.empty() ? "gpu"
                                                                                : asked.gpu_gib ? "gpu-memory"
                                                                                : asked.gpu_tflops
                                                                                    ? "gpu-tflops"
                                                                                    : "gpu-bandwidth");
    const bool asks_for_gpus = asked.gpus || asked.search || options.device == "cuda" || describes;
    if (is_cpu || (asked.gpu.empty() && !asks_for_gpus)) return std::nullopt;
    const std::vector<std::string> names = gpu_names(asked);
    const std::string& name = names.front();
    if (names.size() > 1 && !asked.search)
        user_error("--gpu {}: several GPUs are compared by --search; give it too, or one name",
                   one_line(asked.gpu));
    if (names.size() > 1 && (describes || asked.price))
        user_error("--{} is that of one GPU; give one --gpu", asked.price        ? "price"
                                                              : asked.gpu_gib    ? "gpu-memory"
                                                              : asked.gpu_tflops ? "gpu-tflops"
                                                                                 : "gpu-bandwidth");
    const bool is_described = asked.gpu_gib && asked.gpu_tflops && asked.gpu_bandwidth;
    const GpuModel* const known = is_described ? gpu_named(name) : &known_gpu(name);
    GpuModel gpu = known ? *known : *gpu_named("H100");
    if (!known) {
        notes.push_back(
            fmt::format("{}: links, network and kernels are planned as those of an H100", one_line(name)));
        gpu.fp8 = gpu.fp32 = gpu.tf32 = 0;
        gpu.dollars_an_hour.reset();
    }
    if (asked.gpu.empty()) notes.emplace_back("--gpu was not given: planned for H100");
    if (asked.gpu_gib) gpu.gib = gpu.nominal_gb = *asked.gpu_gib;
    if (asked.network) gpu.network_gbs = *asked.network;
    if (asked.gpu_tflops) gpu.bf16 = 1e12 * *asked.gpu_tflops;
    if (asked.gpu_bandwidth) gpu.memory_gbs = *asked.gpu_bandwidth;
    if (asked.price) gpu.dollars_an_hour = asked.price;
    if (gpu.gib <= 1)
        user_error("--gpu {}: how much of its memory a process sees is not known; give it by --gpu-memory",
                   gpu.name);
    return gpu;
}

// The threads of a process that shares this machine's cores with others.
int threads_of_process(int ranks_of_node) {
    if (std::getenv("OMP_NUM_THREADS") != nullptr) return 0;
    const std::vector<CoreMask> masks(static_cast<std::size_t>(ranks_of_node), own_mask());
    return share_of_cores(masks, 0);
}

}  // namespace

std::vector<std::string> gpu_names(const PlanOptions& asked) {
    std::vector<std::string> names;
    std::istringstream text(asked.gpu.empty() ? "H100" : asked.gpu);
    for (std::string name; std::getline(text, name, ',');) names.push_back(name);
    return names;
}

PlannedMachines machines_of(const PlanOptions& asked, const Options& options, int ranks,
                            std::vector<std::string>& notes) {
    PlannedMachines machines;
    machines.gpu = chosen_gpu(asked, options, notes);
    const int node = machines.gpu ? machines.gpu->node == 2 ? 8 : machines.gpu->node : ranks;
    machines.nodes = static_cast<int>(asked.nodes.value_or(ceiling(ranks, node)));
    if (machines.nodes > ranks)
        user_error("--nodes {} are more than the {}; give at most as many", machines.nodes,
                   plural(ranks, machines.gpu ? "GPU" : "process", machines.gpu ? "s" : "es"));
    // All machines but the last are full, unless the options divide the ranks among them.
    machines.ranks_of_node = asked.nodes ? ceiling(ranks, machines.nodes) : std::min(node, ranks);
    machines.host_bytes = asked.host_bytes.value_or(0);
    machines.nvme_bytes = asked.nvme_bytes.value_or(0);
    machines.nvme_read = 1e9 * asked.nvme_read.value_or(5);
    machines.nvme_write = 1e9 * asked.nvme_write.value_or(2.5);
    if (machines.gpu) {
        machines.sizes = std::make_unique<cuda::GpuSizes>(machines.gpu->chip);
        if (asked.reserve() >= machines.gpu->gib)
            user_error("--reserve {} leaves nothing of a GPU's {} GiB; give less", asked.reserve(),
                       machines.gpu->gib);
        machines.usable = static_cast<std::size_t>((machines.gpu->gib - asked.reserve()) * gib);
        return machines;
    }
    if (asked.reserve_gib)
        user_error("--reserve is of a GPU's memory, and this plan has CPUs; leave it out, or give --gpus");
    auto sizes = std::make_unique<CpuSizes>(threads_of_process(machines.ranks_of_node));
    if (machines.host_bytes == 0) machines.host_bytes = static_cast<double>(sizes->available_memory());
    machines.usable = static_cast<std::size_t>(machines.host_bytes / machines.ranks_of_node);
    machines.sizes = std::move(sizes);
    return machines;
}

namespace {

// bytes/s of a machine's memory: two sockets of eight channels of DDR5-4800, about.
constexpr double host_memory_rate = 600e9;

}  // namespace

StepRates peak_rates(const PlannedMachines& machines, DType dtype, bool uses_tf32) {
    const GpuModel& gpu = *machines.gpu;
    const double flops = gpu.peak(dtype, uses_tf32);
    // Without a link of their own, GPUs of a machine exchange over PCIe. Exchanges hide as far as they can.
    return {.products = flops,
            .fp8_products = gpu.fp8,
            .attention = flops,
            .memory = 1e9 * gpu.memory_gbs,
            .node = {.bytes = 1e9 * (gpu.link_gbs > 0 ? gpu.link_gbs : gpu.pcie_gbs)},
            .network = {.bytes = 1e9 * gpu.network_gbs},
            .host_link = 1e9 * gpu.pcie_gbs,
            .host_memory = host_memory_rate / machines.ranks_of_node,
            .disk_read = machines.nvme_read / machines.ranks_of_node,
            .disk_write = machines.nvme_write / machines.ranks_of_node,
            .ranks_of_node = machines.ranks_of_node,
            .times = {{1, 1, 1, 0, 1, 1, 1, 1, 1, 1}},
            .is_bound = true};
}

StepRates expected_rates(const PlannedMachines& machines, DType dtype, bool uses_tf32, bool is_fp8) {
    StepRates rates = peak_rates(machines, dtype, uses_tf32);
    const bool is_ampere = machines.gpu->chip.architecture < 90;
    rates.products *= is_ampere ? 0.87 : 0.8;
    rates.fp8_products *= 0.71;
    rates.attention *= is_ampere ? 0.5 : 0.33;
    rates.memory *= 0.9;
    rates.host_link *= 0.8;
    rates.host_memory *= 0.7;
    rates.launch = 4e-6;
    rates.multiprocessors = machines.gpu->chip.multiprocessors;
    rates.node = {.bytes = 0.8 * rates.node.bytes, .latency = 3.4e-6};
    rates.network = {.bytes = 0.73 * rates.network.bytes, .latency = 14e-6};
    rates.is_bound = false;
    rates.times = published_times(*machines.gpu, is_fp8);
    return rates;
}

}  // namespace llmc
