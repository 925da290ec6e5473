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
    int block = -1;  // whose it is, if other blocks overwrite what that block computed on the way
};

// What a block's forward pass leaves, in its order.
std::vector<Output> block_outputs(const MicroBatchBuffers<Tensor>& buffers, std::size_t i) {
    const BlockActivations<Tensor>& block = buffers.blocks[i];
    const auto of = [&](const char* layer, const Tensor& tensor) {
        return Output{fmt::format("h.{}{}", i, layer), tensor};
    };
    return {of(".ln_1", block.ln_1),      of(".attn.c_attn", block.qkv),
            of(".attn", block.attention), of(".attn.c_proj", block.residual),
            of(".ln_2", block.ln_2),      of(".mlp.c_fc", block.pre_gelu),
            of(".mlp.act", block.gelu),   of(".mlp.c_proj", buffers.residual[i + 1])};
}

// What the forward pass leaves, in its order: of blocks that recompute, only the last output.
std::vector<Output> forward_outputs(const RunPlan& plan, const ActivationBuffers<Tensor>& buffers) {
    const MicroBatchBuffers<Tensor>& slot = buffers.slots[0];
    std::vector<Output> outputs = {{"wte + wpe", slot.residual[0]}};
    for (std::size_t i = 0; i < slot.blocks.size(); ++i) {
        const auto block = static_cast<int>(i);
        const std::vector<Output> of_block = block_outputs(slot, i);
        if (plan.spec.recompute.recomputes(block)) {
            outputs.push_back({of_block.back().name, of_block.back().tensor, block});
        } else {
            outputs.insert(outputs.end(), of_block.begin(), of_block.end());
        }
    }
    outputs.push_back({"ln_f", buffers.head.ln_f});
    outputs.push_back({"lm_head", buffers.head.losses});
    return outputs;
}

// The first that is not finite on any rank.
std::optional<Output> first_non_finite_of(const std::vector<Output>& outputs, Device& device,
                                          Communicator& ranks) {
    const auto own = std::ranges::find_if(
        outputs, [&](const Output& output) { return !is_finite(device, output.tensor); });
    const std::int32_t first = smallest(static_cast<std::int32_t>(own - outputs.begin()), ranks);
    if (first == std::ssize(outputs)) return std::nullopt;
    return outputs[static_cast<std::size_t>(first)];
}

// The list as far as a block's forward.
Step up_to_block(Step list, int block) {
    const auto last = std::ranges::find_if(list.actions, [&](const Action& action) {
        return action.kind == ActionKind::forward && action.part == Part{PartKind::block, block};
    });
    list.actions.erase(last + 1, list.actions.end());
    return list;
}

std::optional<std::string> non_finite_output(const RunPlan& plan, const Arenas& arenas, Device& device,
                                             Communicator& ranks,
                                             const std::function<void(int, const Step&)>& forward) {
    const ActivationBuffers<Tensor> buffers = bind(plan.activations, arenas);
    const std::vector<Output> outputs = forward_outputs(plan, buffers);
    for (int micro_batch = 0; micro_batch < plan.micro_batches; ++micro_batch) {
        forward(micro_batch, plan.evaluation);
        const auto found = first_non_finite_of(outputs, device, ranks);
        if (!found) continue;
        if (found->block < 0) return found->name;
        forward(micro_batch, up_to_block(plan.evaluation, found->block));
        const auto inside = first_non_finite_of(
            block_outputs(buffers.slots[0], static_cast<std::size_t>(found->block)), device, ranks);
        return inside.value_or(*found).name;
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
                             const std::function<void(int, const Step&)>& forward) {
    if (const auto state = non_finite_state(device, store, ranks)) return *state;
    if (const auto layer = non_finite_output(plan, arenas, device, ranks, forward))
        return fmt::format("the output of {}", *layer);
    if (const auto gradient = first_non_finite_of(gradient_tensors(store), device, store, ranks))
        return *gradient;
    return "the norm of all gradients, each of which is finite";
}

}  // namespace llmc
