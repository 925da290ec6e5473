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

// The smallest of all ranks' numbers.
std::int32_t smallest(std::int32_t own, Communicator& ranks) {
    std::vector<std::int32_t> all(static_cast<std::size_t>(ranks.size()));
    all[static_cast<std::size_t>(ranks.rank())] = own;
    const Tensor gathered{reinterpret_cast<std::byte*>(all.data()), DType::int32, {ranks.size()}};
    ranks.all_gather(gathered, gathered.slice(ranks.rank(), 1));
    return std::ranges::min(all);
}

// A tensor of the model in one of the flat buffers that ranks update.
struct StateTensor {
    int unit;
    const UnitLayout::Entry* entry;
    Flat flat;
    const char* what;

    std::string name(const ParameterStore& store) const {
        return fmt::format("the {} {}", what, store.layout(unit).full_name(entry->spec));
    }
    // Checks the elements that this rank holds.
    bool is_finite(Device& device, const ParameterStore& store) const {
        if (!store.has(unit)) return true;
        const ElementRange own = store.updated(unit);
        const ElementRange range =
            intersection({entry->offset, entry->offset + entry->shape.elements()}, own);
        return range.size() == 0 ||
               llmc::is_finite(device,
                               (store.buffers(unit).*flat).flat(range.begin - own.begin, range.size()));
    }
};

// The first tensor that is not finite on some rank.
std::optional<std::string> first_non_finite_of(const std::vector<StateTensor>& tensors, Device& device,
                                               const ParameterStore& store, Communicator& ranks) {
    const auto own = std::ranges::find_if(
        tensors, [&](const StateTensor& tensor) { return !tensor.is_finite(device, store); });
    const std::int32_t first = smallest(static_cast<std::int32_t>(own - tensors.begin()), ranks);
    if (first == std::ssize(tensors)) return std::nullopt;
    return tensors[static_cast<std::size_t>(first)].name(store);
}

// The gradients in the order of the backward pass: from the head to the embeddings, and within a block from
// the last tensor to the first.
std::vector<StateTensor> gradient_tensors(const ParameterStore& store) {
    std::vector<StateTensor> tensors;
    for (int unit = 0; unit < store.units(); ++unit) {
        for (const UnitLayout::Entry& entry : store.layout(unit).entries())
            tensors.push_back({unit, &entry, &UnitBuffers::updated_gradients, "gradient of"});
    }
    std::ranges::reverse(tensors);
    return tensors;
}

// An output of an operation. The tensor is empty if another stage holds it.
struct Output {
    std::string name;
    Tensor tensor;
    int part;  // the number of its part in the model
};

// The activations of a micro-batch that are kept, in the order of the forward pass. Each has the name of its
// operation.
std::vector<Output> forward_outputs(const RunPlan& plan, const ActivationBuffers<Tensor>& buffers) {
    const Outline& outline = *plan.outline;
    std::vector<Output> outputs;
    std::vector<std::size_t> first;  // each part's first place in `outputs`
    const auto prefix = [&](const Outline::OutlinedPart& part) {
        return part.is_layer() ? outline.unit(part.own_unit).spec.name + "." : "";
    };
    for (int number = 0; number < std::ssize(outline.parts); ++number) {
        const Outline::OutlinedPart& part = outline.part(number);
        first.push_back(outputs.size());
        const auto add = [&](const std::string& label) {
            outputs.push_back({prefix(part) + label, {}, number});
        };
        for (const PartBuffer& kept : plan.lists->of(part).kept) {
            if (!kept.label.empty()) add(kept.label);
        }
        if (!part.makes_losses())
            add(outline.kind_of(part).part.value(outline.kind_of(part).part.output).label);
    }
    for (const Action& action : plan.diagnosis.actions) {
        if (action.kind != ActionKind::forward) continue;
        const Outline::OutlinedPart& part = outline.part(action.part);
        const SlotBuffers<Tensor>& slot = buffers.slots[static_cast<std::size_t>(action.slot)];
        const int place = action.part - plan.diagnosis.chunk_of(action).first_with_input() + 1;
        const std::vector<Tensor>& kept =
            part.makes_losses() ? buffers.losses : slot.kept[static_cast<std::size_t>(place)];
        std::size_t output = first[static_cast<std::size_t>(action.part)];
        for (std::size_t i = 0; i < kept.size(); ++i) {
            if (!plan.lists->of(part).kept[i].label.empty()) outputs[output++].tensor = kept[i];
        }
        for (const BufferUse& use : action.writes) {
            const auto index = static_cast<std::size_t>(use.index);
            if (use.role == BufferRole::chunk_input) outputs[output].tensor = buffers.chunk_inputs[index];
            if (use.role == BufferRole::residual) outputs[output].tensor = slot.residual[index - 1];
        }
    }
    return outputs;
}

// The list up to a part: turns later forward actions into `release`, which does nothing. Communication stays.
Step up_to_part(Step list, int part) {
    for (Action& action : list.actions) {
        if (action.kind == ActionKind::forward && action.part > part) action.kind = ActionKind::release;
    }
    return list;
}

std::optional<std::string> non_finite_output(const RunPlan& plan, const Arenas& arenas, Device& device,
                                             Communicator& ranks, const ForwardPasses& passes) {
    const std::vector<Output> outputs = forward_outputs(plan, bind(plan.activations, arenas));
    const auto is_layer = [&](const Output& output) { return plan.outline->part(output.part).is_layer(); };
    // A layer that recomputes keeps only its last output. Its other outputs exist until a later layer runs.
    const auto first_of = [&](const std::optional<int> only_part) {
        std::size_t first = outputs.size();
        for (std::size_t i = outputs.size(); i-- > 0;) {
            const bool is_last = i + 1 == outputs.size() || outputs[i + 1].part != outputs[i].part;
            const bool stays =
                !is_layer(outputs[i]) || is_last || plan.spec.recompute.kind == RecomputeKind::none;
            if (only_part ? outputs[i].part != *only_part : !stays) continue;
            if (outputs[i].tensor && !is_finite(device, outputs[i].tensor)) first = i;
        }
        return static_cast<std::size_t>(smallest(static_cast<std::int32_t>(first), ranks));
    };
    for (int micro_batch = 0; micro_batch < passes.micro_batches; ++micro_batch) {
        passes.run(micro_batch, plan.diagnosis);
        const std::size_t found = first_of(std::nullopt);
        if (found == outputs.size()) continue;
        const int part = outputs[found].part;
        if (!is_layer(outputs[found]) || plan.spec.recompute.kind == RecomputeKind::none)
            return outputs[found].name;
        passes.run(micro_batch, up_to_part(plan.diagnosis, part));
        const std::size_t inside = first_of(part);
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
                                         {"first moment of", &UnitBuffers::m},
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
