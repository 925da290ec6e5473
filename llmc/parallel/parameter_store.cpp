#include "llmc/parallel/parameter_store.h"

#include <utility>

#include "llmc/model/init.h"

namespace llmc {

StoreLayout lay_out_store(MemoryLayout& layout, const GPTConfig& config, DType dtype, int ranks) {
    StoreLayout store{.dtype = dtype, .ranks = ranks, .units = {}, .buffers = {}};
    for (UnitSpec& spec : gpt_units(config)) {
        const UnitLayout& unit = store.units.emplace_back(std::move(spec));
        const Shape flat{unit.padded_elements(ranks)};
        const BufferId parameters = layout.add(ArenaKind::parameters, unit.name(), dtype, flat);
        store.buffers.push_back(
            {.parameters = parameters,
             .gradients = layout.add(ArenaKind::gradients, unit.name(), DType::fp32, flat),
             .master = dtype == DType::fp32 ? parameters
                                            : layout.add(ArenaKind::master, unit.name(), DType::fp32, flat),
             .m = layout.add(ArenaKind::moments, unit.name() + ".m", DType::fp32, flat),
             .v = layout.add(ArenaKind::moments, unit.name() + ".v", DType::fp32, flat)});
    }
    return store;
}

ParameterStore::ParameterStore(Device& device, const Arenas& arenas, const StoreLayout& layout,
                               double weight_decay)
    : device_(device), dtype_(layout.dtype), ranks_(layout.ranks), layouts_(layout.units) {
    for (const UnitBuffers<BufferId>& ids : layout.buffers) {
        buffers_.push_back({.parameters = arenas[ids.parameters],
                            .gradients = arenas[ids.gradients],
                            .master = arenas[ids.master],
                            .m = arenas[ids.m],
                            .v = arenas[ids.v]});
    }
    for (const UnitLayout& unit : layouts_) {
        std::vector<AdamWSegment>& segments = segments_.emplace_back();
        for (const UnitLayout::Entry& entry : unit.entries()) {
            segments.push_back({.begin = entry.offset,
                                .end = entry.offset + entry.spec.shape.elements(),
                                .weight_decay = entry.spec.decays() ? weight_decay : 0.0});
        }
    }
}

Tensor ParameterStore::shard(const Tensor& flat, int rank) const {
    const std::int64_t elements = flat.elements() / ranks_;
    return flat.flat(rank * elements, elements);
}

void ParameterStore::set_weights(int unit, std::span<const float> values) {
    const UnitBuffers<Tensor>& unit_buffers = buffers(unit);
    check(static_cast<std::int64_t>(values.size()) == unit_buffers.master.elements(),
          "weights of a whole unit");
    device_.upload(unit_buffers.master, values.data());
    if (dtype_ != DType::fp32) device_.ops().cast(unit_buffers.parameters, unit_buffers.master);
}

void ParameterStore::initialize(std::uint64_t seed) {
    std::vector<float> values;
    for (int unit = 0; unit < units(); ++unit) {
        values.resize(static_cast<std::size_t>(buffers(unit).master.elements()));
        initialize_unit(values, layout(unit), seed);
        set_weights(unit, values);
    }
}

}  // namespace llmc
