#include "llmc/train/diagnosis.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <ranges>
#include <span>
#include <string_view>
#include <vector>

#include "llmc/comm/values_of_ranks.h"
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

// A tensor of the model, of what ranks keep of it.
struct KeptTensor {
    int unit;
    const UnitLayout::Entry* entry;
    Kept kept;
    std::string what;

    std::string name(const ParameterStore& store) const {
        return fmt::format("the {} {}", what, store.layout(unit).full_name(entry->spec));
    }
    // Checks the elements that this rank holds.
    bool is_finite(const ParameterStore& store) const {
        if (!store.has(unit)) return true;
        const ElementRange own = store.updated(unit);
        const ElementRange range =
            intersection({entry->offset, entry->offset + entry->shape.elements()}, own);
        if (range.size() == 0) return true;
        bool is_finite = true;
        store.for_each_held(unit, kept, {range.begin - own.begin, range.end - own.begin},
                            [&](Device& device, const Tensor& held) {
                                is_finite = is_finite &&
                                            (held.dtype == DType::uint8 || llmc::is_finite(device, held));
                            });
        return is_finite;
    }
};

// Calls f(kept, what) for each tensor of an optimizer's state.
template <class F>
void for_each_state(const Optimizer& optimizer, const F& f) {
    for (std::size_t i = 0; i < optimizer.state.size(); ++i) f(kept_state(i), optimizer.state[i].described);
}

// The first tensor that is not finite on some rank.
std::optional<std::string> first_non_finite_of(const std::vector<KeptTensor>& tensors,
                                               const ParameterStore& store, Communicator& ranks) {
    const auto own =
        std::ranges::find_if(tensors, [&](const KeptTensor& tensor) { return !tensor.is_finite(store); });
    const std::int32_t first =
        std::ranges::min(values_of_ranks(ranks, static_cast<std::int32_t>(own - tensors.begin())));
    if (first == std::ssize(tensors)) return std::nullopt;
    return tensors[static_cast<std::size_t>(first)].name(store);
}

// The gradients in the order of the backward pass: from the head to the embeddings, and within a block from
// the last tensor to the first.
std::vector<KeptTensor> gradient_tensors(const ParameterStore& store) {
    std::vector<KeptTensor> tensors;
    for (int unit = 0; unit < store.units(); ++unit) {
        if (store.is_frozen(unit)) continue;
        for (const UnitLayout::Entry& entry : store.layout(unit).entries())
            tensors.push_back({unit, &entry, Kept::gradients, "gradient of"});
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
        return static_cast<std::size_t>(
            std::ranges::min(values_of_ranks(ranks, static_cast<std::int32_t>(first))));
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

std::optional<std::string> non_finite_state(const ParameterStore& store, Communicator& ranks) {
    std::vector<KeptTensor> tensors;
    for (int unit = 0; unit < store.units(); ++unit) {
        if (store.is_frozen(unit)) continue;  // they were finite when they were loaded
        const auto add = [&](Kept kept, const std::string& what) {
            for (const UnitLayout::Entry& entry : store.layout(unit).entries())
                tensors.push_back({unit, &entry, kept, what});
        };
        add(Kept::parameters, "weight");
        for (const UnitLayout::Entry& entry : store.layout(unit).entries()) {
            for_each_state(store.optimizer_of(unit, entry.spec), [&](Kept kept, std::string_view what) {
                tensors.push_back({unit, &entry, kept, fmt::format("{} of", what)});
            });
        }
    }
    return first_non_finite_of(tensors, store, ranks);
}

std::string first_non_finite(const RunPlan& plan, const Arenas& arenas, Device& device,
                             const ParameterStore& store, Communicator& ranks, const ForwardPasses& passes) {
    if (const auto state = non_finite_state(store, ranks)) return *state;
    if (const auto layer = non_finite_output(plan, arenas, device, ranks, passes))
        return fmt::format("the output of {}", *layer);
    if (const auto gradient = first_non_finite_of(gradient_tensors(store), store, ranks)) return *gradient;
    return "the norm of all gradients, each of which is finite";
}

namespace {

// This rank's share of a tensor, which may be all of it. Ranks with the same share must have equal bytes.
struct TensorShare {
    std::uint64_t hash = 0;
    std::int64_t number = 0;  // the share's number; `none` if this rank has none
    bool operator==(const TensorShare&) const = default;
};
constexpr std::int64_t none = -1;

struct NamedShare {
    std::string name;
    TensorShare share;
};

class Hasher {
  public:
    // The hash of a tensor's elements.
    std::uint64_t operator()(Device& device, const Tensor& tensor) {
        bytes_.resize(tensor.bytes());
        device.download(bytes_.data(), tensor);
        return XXH3_64bits(bytes_.data(), bytes_.size());
    }

  private:
    std::vector<std::byte> bytes_;
};

// The same list of names on all ranks.
std::vector<NamedShare> shares_of(const ParameterStore& store, int shard) {
    const Sharding& sharding = store.sharding();
    Hasher hash;
    std::vector<NamedShare> shares;
    for (int unit = 0; unit < store.units(); ++unit) {
        for (const UnitLayout::Entry& entry : store.layout(unit).entries()) {
            const std::string name = store.layout(unit).full_name(entry.spec);
            const ElementRange tensor{entry.offset, entry.offset + entry.stored.elements()};
            // Adds the tensor's elements. A shard may have none.
            const auto add = [&](std::string_view what, Kept kept, bool is_whole) {
                NamedShare& named =
                    shares.emplace_back(NamedShare{fmt::format("{} {}", what, name), {0, none}});
                if (!store.has(unit)) return;
                const ElementRange range =
                    is_whole ? ElementRange{0, store.elements(unit)} : store.shard(unit, shard);
                const ElementRange part = intersection(tensor, range);
                // Each rank of a tensor-parallel group has its own share.
                const TensorRank ranks = entry.spec.divided_dim(store.layout(unit).ranks().size)
                                             ? store.layout(unit).ranks()
                                             : TensorRank{};
                named.share.number = (is_whole ? 0 : shard) * ranks.size + ranks.rank;
                if (part.size() == 0) return;
                store.for_each_held(unit, kept, {part.begin - range.begin, part.end - range.begin},
                                    [&](Device& device, const Tensor& held) {
                                        named.share.hash = 31 * named.share.hash + hash(device, held);
                                    });
            };
            const bool whole_state = sharding.keeps_optimizer_whole();
            if (sharding.keeps_parameters_whole()) {
                add("parameters", Kept::whole_parameters, true);
            } else {
                add("parameters", Kept::parameters, false);
            }
            if (store.is_frozen(unit)) continue;
            if (store.has_master(unit)) add("master weights", Kept::master, whole_state);
            for_each_state(store.optimizer_of(unit, entry.spec),
                           [&](Kept kept, std::string_view what) { add(what, kept, whole_state); });
        }
    }
    return shares;
}

// These ranks should have the same hash. Returns those that differ from the most frequent hash. The first
// rank's hash wins a tie.
std::vector<int> odd_ones(const std::vector<int>& ranks, const std::vector<std::uint64_t>& hashes) {
    std::map<std::uint64_t, int> counts;
    for (const std::uint64_t hash : hashes) ++counts[hash];
    std::uint64_t most_common = hashes.front();
    for (const auto& [hash, count] : counts) {
        if (count > counts[most_common]) most_common = hash;
    }
    std::vector<int> odd;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
        if (hashes[i] != most_common) odd.push_back(ranks[i]);
    }
    return odd;
}

}  // namespace

std::optional<std::string> differing_replica(const ParameterStore& store, Communicator& world) {
    const std::vector<NamedShare> shares = shares_of(store, store.shard());
    std::vector<TensorShare> own;
    for (const NamedShare& share : shares) own.push_back(share.share);
    const std::vector<TensorShare> all = values_of_ranks(world, std::span<const TensorShare>(own));
    for (std::size_t i = 0; i < shares.size(); ++i) {
        struct Replicas {
            std::vector<int> ranks;
            std::vector<std::uint64_t> hashes;
        };
        std::map<std::int64_t, Replicas> replicas_of_share;
        for (int rank = 0; rank < world.size(); ++rank) {
            const TensorShare& share = all[static_cast<std::size_t>(rank) * shares.size() + i];
            if (share.number == none) continue;
            replicas_of_share[share.number].ranks.push_back(rank);
            replicas_of_share[share.number].hashes.push_back(share.hash);
        }
        for (const auto& [_, replicas] : replicas_of_share) {
            const std::vector<int> odd = odd_ones(replicas.ranks, replicas.hashes);
            if (odd.empty()) continue;
            const auto other = std::ranges::find_if(
                replicas.ranks, [&](int rank) { return std::ranges::find(odd, rank) == odd.end(); });
            return fmt::format("the {} of rank{} {} differ from those of rank {}", shares[i].name,
                               odd.size() == 1 ? "" : "s", fmt::join(odd, ", "), *other);
        }
    }
    return std::nullopt;
}

}  // namespace llmc
