#include "llmc/planner/conventions.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "llmc/core/error.h"

namespace llmc {

namespace {

constexpr std::array conventions = {Convention{"bf16-8", 2, 2, 4, 4},       // moments in 2 bytes
                                    Convention{"mixed-12", 2, 2, 8, 8},     // moments in fp32, no master copy
                                    Convention{"fp32-16", 4, 4, 8, 8},      // all in fp32
                                    Convention{"master-16", 2, 2, 12, 8}};  // with a master copy in fp32

}  // namespace

std::vector<std::string> convention_names() {
    std::vector<std::string> names = {"ours"};
    for (const Convention& convention : conventions) names.emplace_back(convention.name);
    names.emplace_back("accelerate");
    return names;
}

Convention convention_named(std::string_view name, const StoreDtypes& dtypes) {
    const auto* const found = std::ranges::find(conventions, name, &Convention::name);
    if (found != conventions.end()) return *found;
    const auto bytes = [](DType dtype) { return static_cast<double>(size_of(dtype)); };
    const double master = dtypes.compute != DType::fp32 && dtypes.has_master ? 4 : 0,
                 moments = dtypes.moment_bytes();
    return {"ours", bytes(dtypes.compute), bytes(dtypes.gradients), master + moments, moments};
}

namespace {

// Moves a GPU's share of what is offloaded to the places of its machine.
void offload(const ConventionRequest& request, ConventionalMemory& memory) {
    for (const auto& [tier, gb] : {std::pair(request.state, &memory.per_gpu.optimizer),
                                   std::pair(request.weights, &memory.per_gpu.weights)})
        if (tier != Tier::device)
            (tier == Tier::host ? memory.host : memory.disk).gb +=
                request.gpus_of_machine * std::exchange(*gb, 0);
    for (const auto& [place, all] :
         {std::pair(&memory.host, request.host_gb), std::pair(&memory.disk, request.disk_gb)}) {
        if (all > 0) place->left_gb = all - place->gb;
        memory.fits = memory.fits && place->left_gb.value_or(0) >= 0;
    }
}

}  // namespace

ConventionalMemory conventional_memory(const ConventionRequest& request) {
    const Convention& by = request.convention;
    const double optimizer = by.optimizer - (request.uses_sgd ? by.moments / 2 : 0),
                 gb = request.parameters / 1e9;
    ConventionalMemory memory;
    StateGb& whole = memory.whole;
    whole = {gb * by.weights, gb * by.gradients, gb * optimizer, request.activation_gb};
    if (request.half_weights) whole.activations = whole.weights / 2;
    const auto all = static_cast<double>(request.divisions);
    const auto share = [&](bool is_divided) {
        return is_divided ? all * static_cast<double>(request.shards) : all;
    };
    const int stage = request.zero_stage;
    memory.per_gpu = {whole.weights / share(stage >= 3), whole.gradients / share(stage >= 2),
                      whole.optimizer / share(stage >= 1), whole.activations};
    if (stage >= 1) memory.divided_gb += memory.per_gpu.optimizer;
    if (stage >= 2) memory.divided_gb += memory.per_gpu.gradients;
    if (stage >= 3) memory.divided_gb += memory.per_gpu.weights + whole.activations / share(true);
    offload(request, memory);
    if (request.card_gb > 0) {
        memory.left_gb = request.card_gb - memory.per_gpu.total();
        memory.fits = memory.fits && memory.left_gb >= 0;
        const double room = request.card_gb - whole.activations,
                     divided = whole.gradients + (request.state == Tier::device ? whole.optimizer : 0) +
                               (request.weights == Tier::device ? whole.weights : 0);
        if (room > 0) memory.least_gpus = std::max<std::int64_t>(1, std::llround(std::ceil(divided / room)));
    }
    return memory;
}

AccelerateRow accelerate_row(double bytes, bool is_fp16) {
    constexpr double mib = 1 << 20;
    const double model = bytes / mib;
    // fp16 keeps the model in fp32 too: its row is that of training with a master copy.
    return is_fp16 ? AccelerateRow{model, 1.5 * model, 2 * model, 2 * model}
                   : AccelerateRow{model, model, 2 * model, 4 * model};
}

}  // namespace llmc
