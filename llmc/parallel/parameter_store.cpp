#include "llmc/parallel/parameter_store.h"

#include <utility>

#include "llmc/device/stochastic_rounding.h"
#include "llmc/model/init.h"
#include "llmc/parallel/step.h"

namespace llmc {

StoreLayout lay_out_store(MemoryLayout& layout, const GPTConfig& config, const StoreDtypes& dtypes,
                          int ranks) {
    const DType dtype = dtypes.compute;
    check(dtypes.gradients == DType::fp32 || dtypes.gradients == dtype,
          "gradients are fp32 or of the compute dtype");
    StoreLayout store{.dtype = dtype, .ranks = ranks, .units = {}, .buffers = {}};
    for (UnitSpec& spec : gpt_units(config)) {
        const UnitLayout& unit = store.units.emplace_back(std::move(spec));
        const Shape flat{unit.padded_elements(ranks)};
        const BufferId parameters = layout.add(ArenaKind::parameters, unit.name(), dtype, flat);
        const BufferId gradients = layout.add(ArenaKind::gradients, unit.name(), dtypes.gradients, flat);
        BufferId sums = gradients;
        if (dtypes.gradients != DType::fp32) {
            const auto number = static_cast<int>(store.buffers.size());
            const int shared = gradient_sums_of(number, static_cast<int>(config.layers));
            sums = shared == number
                       ? layout.add(ArenaKind::gradients, unit.name() + ".sums", DType::fp32, flat)
                       : store.buffers[static_cast<std::size_t>(shared)].gradient_sums;
        }
        store.buffers.push_back(
            {.parameters = parameters,
             .gradients = gradients,
             .gradient_sums = sums,
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
                            .gradient_sums = arenas[ids.gradient_sums],
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

std::int64_t ParameterStore::first_element(int unit) const {
    std::int64_t first = 0;
    for (int before = 0; before < unit; ++before) first += layout(before).padded_elements(1);
    return first;
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

void ParameterStore::round_stochastically(std::uint64_t seed, std::int64_t step) {
    std::vector<float> weights;
    std::vector<bfloat16> rounded;
    for (int unit = 0; unit < units(); ++unit) {
        const Tensor &master = buffers(unit).master, &parameters = buffers(unit).parameters;
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
        values.resize(static_cast<std::size_t>(buffers(unit).master.elements()));
        initialize_unit(values, layout(unit), seed);
        set_weights(unit, values);
    }
}

}  // namespace llmc
