// Lays out a rank's state by ZeRO stage, and fills its weights.
#include "llmc/parallel/zero/parameter_store.h"

#include <algorithm>
#include <utility>

#include "llmc/device/stochastic_rounding.h"

namespace llmc {

StoreLayout lay_out_store(MemoryLayout& layout, const StoreDtypes& dtypes, const StagePart& part,
                          const Sharding& sharding, int micro_batches, TensorRank tensor, bool trains) {
    const DType dtype = dtypes.compute;
    check(dtypes.gradients == DType::fp32 || dtypes.gradients == dtype,
          "gradients are fp32 or of the compute dtype");
    StoreLayout store{.dtypes = dtypes, .sharding = sharding, .part = part, .units = {}, .buffers = {}};
    for (const Outline::OutlinedUnit& outlined : part.outline->units) {
        const UnitLayout& unit = store.units.emplace_back(outlined.spec, tensor);
        const auto number = static_cast<int>(store.buffers.size());
        if (!part.has_unit(number)) {
            store.buffers.emplace_back();
            continue;
        }
        const int rounds = micro_batches * part.unit(number).rounds;
        const std::int64_t elements = unit.padded_elements(sharding.ranks());
        const Shape whole{elements}, shard{elements / sharding.shards};
        const Shape& updated = sharding.keeps_optimizer_whole() ? whole : shard;
        const auto if_training = [&](const Shape& shape) { return trains ? shape : Shape{0}; };

        // Blocks that share a buffer use that of the first such block.
        const auto at = [&](int place, BufferId UnitBufferIds::*buffer, auto&& make) {
            return place == number ? make() : store.buffers[static_cast<std::size_t>(place)].*buffer;
        };
        UnitBufferIds ids{};
        ids.parameters = at(place_of_parameters(sharding, number, part), &UnitBufferIds::parameters,
                            [&] { return layout.add(ArenaKind::parameters, unit.name(), dtype, whole); });
        if (!sharding.keeps_parameters_whole())
            ids.parameter_shard = layout.add(ArenaKind::parameters, unit.name() + ".shard", dtype, shard);
        ids.gradients =
            at(place_of_gradients(sharding, rounds, number, part), &UnitBufferIds::gradients, [&] {
                return layout.add(ArenaKind::gradients, unit.name(), dtypes.gradients, if_training(whole));
            });
        if (sharding.keeps_gradient_shards(rounds))
            ids.gradient_shard = layout.add(ArenaKind::gradients, unit.name() + ".shard", dtypes.gradients,
                                            if_training(shard));
        ids.gradient_sums =
            dtypes.gradients == DType::fp32
                ? ids.gradients
                : at(place_of_gradient_sums(number, part), &UnitBufferIds::gradient_sums, [&] {
                      return layout.add(ArenaKind::gradients, unit.name() + ".sums", DType::fp32,
                                        if_training(whole));
                  });
        if (dtype != DType::fp32 && dtypes.has_master)
            ids.master = layout.add(ArenaKind::master, unit.name(), DType::fp32, updated);
        ids.m = layout.add(ArenaKind::moments, unit.name() + ".m", dtypes.moments, if_training(updated));
        ids.v = layout.add(ArenaKind::moments, unit.name() + ".v", dtypes.moments, if_training(updated));
        store.buffers.push_back(ids);
    }
    return store;
}

ElementRange intersection(const ElementRange& a, const ElementRange& b) {
    const std::int64_t begin = std::max(a.begin, b.begin);
    return {begin, std::max(begin, std::min(a.end, b.end))};
}

ParameterStore::ParameterStore(Device& device, const Arenas& arenas, const StoreLayout& layout,
                               double weight_decay, int shard)
    : device_(device),
      dtypes_(layout.dtypes),
      sharding_(layout.sharding),
      part_(layout.part),
      shard_(shard),
      layouts_(layout.units) {
    const bool whole = sharding_.keeps_optimizer_whole();
    for (const UnitBufferIds& ids : layout.buffers) {
        UnitBuffers& unit = buffers_.emplace_back();
        segments_.emplace_back();
        const auto number = static_cast<int>(buffers_.size()) - 1;
        if (!has(number)) continue;
        unit.parameters = arenas[ids.parameters];
        unit.gradients = arenas[ids.gradients];
        unit.gradient_sums = arenas[ids.gradient_sums];
        unit.m = arenas[ids.m];
        unit.v = arenas[ids.v];
        unit.parameter_shard =
            ids.parameter_shard ? arenas[*ids.parameter_shard] : own_shard(unit.parameters);
        unit.gradient_shard = ids.gradient_shard ? arenas[*ids.gradient_shard] : own_shard(unit.gradients);
        unit.updated_parameters = whole ? unit.parameters : unit.parameter_shard;
        unit.updated_gradients = whole ? unit.gradients : unit.gradient_shard;
        unit.master = ids.master ? arenas[*ids.master] : unit.updated_parameters;
        const ElementRange own = updated(number);
        std::vector<AdamWSegment>& segments = segments_.back();
        for (const UnitLayout::Entry& entry : this->layout(number).entries()) {
            const ElementRange part =
                intersection({entry.offset, entry.offset + entry.shape.elements()}, own);
            if (part.size() == 0) continue;
            segments.push_back({.begin = part.begin - own.begin,
                                .end = part.end - own.begin,
                                .weight_decay = entry.spec.decays() ? weight_decay : 0.0});
        }
    }
}

ElementRange ParameterStore::shard(int unit, int shard) const {
    const std::int64_t size = elements(unit) / sharding_.shards;
    return {shard * size, (shard + 1) * size};
}

ElementRange ParameterStore::updated(int unit) const {
    return sharding_.keeps_optimizer_whole() ? ElementRange{0, elements(unit)} : shard(unit, shard_);
}

std::int64_t ParameterStore::first_element(int unit) const {
    std::int64_t first = updated(unit).begin;
    for (int before = 0; before < unit; ++before) first += layout(before).padded_elements(1);
    return first;
}

Tensor ParameterStore::own_shard(const Tensor& flat) const {
    const std::int64_t elements = flat.elements() / sharding_.shards;
    return flat.flat(shard_ * elements, elements);
}

void ParameterStore::set_weights(int unit, std::span<const float> values) {
    const UnitBuffers& own = buffers(unit);
    check(static_cast<std::int64_t>(values.size()) == own.master.elements(),
          "as many weights as this rank updates");
    upload_rounded(device_, own.master, values);
    if (has_master()) device_.ops().cast(own.updated_parameters, own.master);
}

void ParameterStore::round_stochastically(std::uint64_t seed, std::int64_t step) {
    std::vector<float> weights;
    std::vector<bfloat16> rounded;
    for (int unit = 0; unit < units(); ++unit) {
        if (!has(unit)) continue;
        const Tensor &master = buffers(unit).master, &parameters = buffers(unit).updated_parameters;
        check(parameters.dtype == DType::bf16, "stochastic rounding is to bf16");
        const std::int64_t elements = master.elements();
        weights.resize(static_cast<std::size_t>(elements));
        rounded.resize(weights.size());
        device_.download(weights.data(), master);
        llmc::round_stochastically(rounded.data(), weights.data(), 0, elements,
                                   {.seed = seed, .first_element = first_element(unit)}, step);
        device_.upload(parameters, rounded.data());
    }
}

void ParameterStore::initialize(std::uint64_t seed) {
    std::vector<float> values;
    for (int unit = 0; unit < units(); ++unit) {
        if (!has(unit)) continue;
        const ElementRange own = updated(unit);
        values.resize(static_cast<std::size_t>(own.size()));
        initialize_unit(values, own.begin, layout(unit), seed);
        set_weights(unit, values);
    }
}

}  // namespace llmc
