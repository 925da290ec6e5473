#include "llmc/train/diagnosis.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ranges>
#include <vector>

#include "llmc/core/error.h"

namespace llmc {

namespace {

bool is_finite(Device& device, const Tensor& tensor) {
    std::vector<std::byte> bytes(tensor.bytes());
    device.download(bytes.data(), tensor);
    return with_dtype(tensor.dtype, [&](auto element) {
        const auto* values = reinterpret_cast<const decltype(element)*>(bytes.data());
        return std::all_of(values, values + tensor.elements(),
                           [](auto x) { return std::isfinite(to_float(x)); });
    });
}

using Flat = Tensor UnitBuffers::*;

// The smallest of the ranks' numbers.
std::int32_t smallest(std::int32_t own, Communicator& ranks) {
    std::vector<std::int32_t> all(static_cast<std::size_t>(ranks.size()));
    all[static_cast<std::size_t>(ranks.rank())] = own;
    const Tensor gathered{reinterpret_cast<std::byte*>(all.data()), DType::int32, {ranks.size()}};
    ranks.all_gather(gathered, gathered.slice(ranks.rank(), 1));
    return std::ranges::min(all);
}

// A tensor of the model in one of the flat buffers of what ranks update.
struct StateTensor {
    int unit;
    const UnitLayout::Entry* entry;
    Flat flat;
    const char* what;

    std::string name(const ParameterStore& store) const {
        return fmt::format("the {} {}", what, store.layout(unit).full_name(entry->spec));
    }
    // Of what this rank has of it.
    bool is_finite(Device& device, const ParameterStore& store) const {
        const ElementRange own = store.updated(unit);
        const ElementRange part =
            intersection({entry->offset, entry->offset + entry->spec.shape.elements()}, own);
        return part.size() == 0 ||
               llmc::is_finite(device, (store.buffers(unit).*flat).flat(part.begin - own.begin, part.size()));
    }
};

// The first that is not finite on any rank.
std::optional<std::string> first_non_finite_of(const std::vector<StateTensor>& tensors, Device& device,
                                               const ParameterStore& store, Communicator& ranks) {
    const auto own = std::ranges::find_if(
        tensors, [&](const StateTensor& tensor) { return !tensor.is_finite(device, store); });
    const std::int32_t first = smallest(static_cast<std::int32_t>(own - tensors.begin()), ranks);
    if (first == std::ssize(tensors)) return std::nullopt;
    return tensors[static_cast<std::size_t>(first)].name(store);
}

// As the backward pass goes: from the head to the embeddings, in a block from its last tensor to its first.
std::vector<StateTensor> gradient_tensors(const ParameterStore& store) {
    std::vector<StateTensor> tensors;
    for (int unit = 0; unit < store.units(); ++unit) {
        for (const UnitLayout::Entry& entry : store.layout(unit).entries())
            tensors.push_back({unit, &entry, &UnitBuffers::updated_gradients, "gradient of"});
    }
    std::ranges::reverse(tensors);
    return tensors;
}

struct Output {
    std::string name;  // of the layer that makes it
    Tensor tensor;
};

// What the forward pass leaves, in its order.
std::vector<Output> forward_outputs(const RunPlan& plan, const Arenas& arenas) {
    const ActivationBuffers<Tensor> buffers = bind(plan.activations, arenas);
    const MicroBatchBuffers<Tensor>& slot = buffers.slots[0];
    std::vector<Output> outputs = {{"wte + wpe", slot.residual[0]}};
    for (std::size_t i = 0; i < slot.blocks.size(); ++i) {
        const BlockActivations<Tensor>& block = slot.blocks[i];
        const auto add = [&](const char* layer, const Tensor& tensor) {
            outputs.push_back({fmt::format("h.{}{}", i, layer), tensor});
        };
        add(".ln_1", block.ln_1);
        add(".attn.c_attn", block.qkv);
        add(".attn", block.attention);
        add(".attn.c_proj", block.residual);
        add(".ln_2", block.ln_2);
        add(".mlp.c_fc", block.pre_gelu);
        add(".mlp.act", block.gelu);
        add(".mlp.c_proj", slot.residual[i + 1]);
    }
    outputs.push_back({"ln_f", buffers.head.ln_f});
    outputs.push_back({"lm_head", buffers.head.losses});
    return outputs;
}

std::optional<std::string> non_finite_output(const RunPlan& plan, const Arenas& arenas, Device& device,
                                             Communicator& ranks, const std::function<void(int)>& forward) {
    const std::vector<Output> outputs = forward_outputs(plan, arenas);
    for (int micro_batch = 0; micro_batch < plan.micro_batches; ++micro_batch) {
        forward(micro_batch);
        const auto found = std::ranges::find_if(
            outputs, [&](const Output& output) { return !is_finite(device, output.tensor); });
        const std::int32_t first = smallest(static_cast<std::int32_t>(found - outputs.begin()), ranks);
        if (first < std::ssize(outputs)) return outputs[static_cast<std::size_t>(first)].name;
    }
    return std::nullopt;
}

}  // namespace

std::optional<std::string> non_finite_state(Device& device, const ParameterStore& store,
                                            Communicator& ranks) {
    std::vector<StateTensor> tensors;
    for (int unit = 0; unit < store.units(); ++unit) {
        for (const auto& [what, flat] : {std::pair{"weight", &UnitBuffers::updated_parameters},
                                         {"moment of", &UnitBuffers::m},
                                         {"second moment of", &UnitBuffers::v}}) {
            for (const UnitLayout::Entry& entry : store.layout(unit).entries())
                tensors.push_back({unit, &entry, flat, what});
        }
    }
    return first_non_finite_of(tensors, device, store, ranks);
}

std::string first_non_finite(const RunPlan& plan, const Arenas& arenas, Device& device,
                             const ParameterStore& store, Communicator& ranks,
                             const std::function<void(int)>& forward) {
    if (const auto state = non_finite_state(device, store, ranks)) return *state;
    if (const auto layer = non_finite_output(plan, arenas, device, ranks, forward))
        return fmt::format("the output of {}", *layer);
    if (const auto gradient = first_non_finite_of(gradient_tensors(store), device, store, ranks))
        return *gradient;
    return "the norm of all gradients, each of which is finite";
}

}  // namespace llmc
