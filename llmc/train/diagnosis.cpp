#include "llmc/train/diagnosis.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
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
        if (!store.has(unit)) return true;
        const ElementRange own = store.updated(unit);
        const ElementRange part = intersection({entry->offset, entry->offset + entry->shape.elements()}, own);
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

// What a layer makes; empty where another stage has it.
struct Output {
    std::string name;
    Tensor tensor;
};

constexpr std::array layers_of_block = {".ln_1", ".attn.c_attn", ".attn",    ".attn.c_proj",
                                        ".ln_2", ".mlp.c_fc",    ".mlp.act", ".mlp.c_proj"};

// What the forward pass of a micro-batch leaves, in its order, by the names of the layers that make it.
std::vector<Output> forward_outputs(const RunPlan& plan, const ActivationBuffers<Tensor>& buffers) {
    std::vector<Output> outputs(1, {"wte + wpe", {}});
    for (std::int64_t i = 0; i < plan.spec.config.layers; ++i) {
        for (const char* layer : layers_of_block) outputs.push_back({fmt::format("h.{}{}", i, layer), {}});
    }
    outputs.push_back({"ln_f", {}});
    outputs.push_back({"lm_head", {}});

    for (const Action& action : plan.diagnosis.actions) {
        if (action.kind != ActionKind::forward) continue;
        if (action.part.kind == PartKind::embedding) {
            const auto input = static_cast<std::size_t>(action.writes.front().index);
            outputs[0].tensor = buffers.chunk_inputs[input];
        } else if (action.part.kind == PartKind::head) {
            outputs[outputs.size() - 2].tensor = buffers.head->ln_f;
            outputs[outputs.size() - 1].tensor = buffers.head->losses;
        } else {
            const SlotBuffers<Tensor>& slot = buffers.slots[static_cast<std::size_t>(action.slot)];
            const auto place =
                static_cast<std::size_t>(action.part.block - plan.diagnosis.chunk_of(action).first_block);
            const BlockActivations<Tensor>& block = slot.blocks[place];
            const std::array tensors = {block.ln_1, block.qkv,      block.attention, block.residual,
                                        block.ln_2, block.pre_gelu, block.gelu,      slot.residual[place]};
            const std::size_t first =
                1 + layers_of_block.size() * static_cast<std::size_t>(action.part.block);
            for (std::size_t i = 0; i < tensors.size(); ++i) outputs[first + i].tensor = tensors[i];
        }
    }
    return outputs;
}

// The block that makes the output of this number; -1: the embedding or the head.
int block_of_output(std::size_t number, const std::vector<Output>& outputs) {
    const bool is_in_block = number > 0 && number + 2 < outputs.size();
    return is_in_block ? static_cast<int>((number - 1) / layers_of_block.size()) : -1;
}

// The list without what is computed behind a block; what ranks say to each other stays.
Step up_to_block(Step list, int block) {
    for (Action& action : list.actions) {
        const bool is_behind = action.part.kind == PartKind::head ||
                               (action.part.kind == PartKind::block && action.part.block > block);
        if (action.kind == ActionKind::forward && is_behind) action.kind = ActionKind::release;
    }
    return list;
}

std::optional<std::string> non_finite_output(const RunPlan& plan, const Arenas& arenas, Device& device,
                                             Communicator& ranks, const ForwardPasses& passes) {
    const std::vector<Output> outputs = forward_outputs(plan, bind(plan.activations, arenas));
    // Of blocks that recompute only the last output stays; their others, once no later block has run.
    const auto first_of = [&](const std::optional<int> only_block) {
        std::size_t first = outputs.size();
        for (std::size_t i = outputs.size(); i-- > 0;) {
            const int block = block_of_output(i, outputs);
            const bool stays = block < 0 || i % layers_of_block.size() == 0 ||
                               plan.spec.recompute.kind == RecomputeKind::none;
            if (only_block ? block != *only_block : !stays) continue;
            if (outputs[i].tensor && !is_finite(device, outputs[i].tensor)) first = i;
        }
        return static_cast<std::size_t>(smallest(static_cast<std::int32_t>(first), ranks));
    };
    for (int micro_batch = 0; micro_batch < passes.micro_batches; ++micro_batch) {
        passes.run(micro_batch, plan.diagnosis);
        const std::size_t found = first_of(std::nullopt);
        if (found == outputs.size()) continue;
        const int block = block_of_output(found, outputs);
        if (block < 0 || plan.spec.recompute.kind == RecomputeKind::none) return outputs[found].name;
        passes.run(micro_batch, up_to_block(plan.diagnosis, block));
        const std::size_t inside = first_of(block);
        return outputs[std::min(found, inside)].name;
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
                             const ParameterStore& store, Communicator& ranks, const ForwardPasses& passes) {
    if (const auto state = non_finite_state(device, store, ranks)) return *state;
    if (const auto layer = non_finite_output(plan, arenas, device, ranks, passes))
        return fmt::format("the output of {}", *layer);
    if (const auto gradient = first_non_finite_of(gradient_tensors(store), device, store, ranks))
        return *gradient;
    return "the norm of all gradients, each of which is finite";
}

}  // namespace llmc
