// What the conventions of lessons and other planners count for a planned run.
#include "llmc/core/text.h"
#include "llmc/planner/planned_run.h"

namespace llmc {

Convention PlannedRun::convention_used() const {
    return convention_named(asked.convention, options.store_dtypes());
}

std::optional<double> PlannedRun::activation_bytes_of_layer() const {
    if (asked.activations != "by-layer") return std::nullopt;
    const std::int64_t channels = described ? described->channels : options.size_of_model("channels");
    return 4 * convention_used().weights * static_cast<double>(options.micro_batch_size.value_or(1)) *
           static_cast<double>(sequence_length()) * static_cast<double>(channels);
}

std::optional<ConventionalMemory> PlannedRun::convention() const {
    if (!mesh || asked.convention == "accelerate") return std::nullopt;
    constexpr double gb = 1e9, gib = 1 << 30;
    const bool is_ours = asked.convention == "ours";
    ConventionRequest request{.convention = convention_used(),
                              .parameters = parameters(),
                              .activation_gb = parse_bytes(asked.activations).value_or(0) / gb,
                              .half_weights = asked.activations == "half-weights",
                              .uses_sgd = asked.optimizer == "sgd",
                              .zero_stage = mesh->sharding.stage,
                              .shards = mesh->sharding.shards,
                              .divisions = std::int64_t{mesh->pipeline} * mesh->tensor,
                              .gpus_of_machine = machines.ranks_of_node};
    if (const auto bytes = activation_bytes_of_layer())
        request.activation_gb =
            static_cast<double>(described ? described->layers : options.layers()) * *bytes / gb;
    if (machines.gpu) request.card_gb = is_ours ? machines.gpu->gib * gib / gb : machines.gpu->nominal_gb;
    // What our own runs keep in the host's memory is more, and the plan of a run has it.
    if (!is_ours) {
        request.state = mesh->sharding.offload.state;
        request.weights = mesh->sharding.offload.parameters;
        request.host_gb = machines.gpu ? machines.host_bytes / gb : 0;
        request.disk_gb = machines.nvme_bytes / gb;
    }
    return conventional_memory(request);
}

// bytes: what AutoModel loads of this model. That is without a head that is not tied, and with RoPE's tables: fp32
// cosines and sines of each layer, position and element of a head.
double PlannedRun::accelerate_bytes() const {
    double bytes = 4 * parameters();
    if (described) bytes += static_cast<double>(described->buffer_bytes);
    if (!model) return bytes;
    const ModelChoices choices = options.choices_of_model();
    const auto has = [&](const char* name) { return choices.values.contains(name); };
    const auto size = [&](const char* name) { return static_cast<double>(choices.size(name)); };
    if (has("tied-head") && !choices.is_on("tied-head")) bytes -= 4 * size("vocab-size") * size("channels");
    if (has("rope-theta"))
        bytes += 2 * 4 * size("layers") * size("seq-len") * static_cast<double>(head_sizes(choices).size);
    return bytes;
}

}  // namespace llmc
