#include "llmc/parallel/zero/checkpoint_share.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace llmc {

namespace {

std::size_t number_of(Kept kept) { return kept == Kept::master ? 0 : kept == Kept::state1 ? 1 : 2; }
Kept kept_of(std::size_t number) { return number == 0 ? Kept::master : kept_state(number - 1); }

}  // namespace

Writers writers_of(const Mesh& mesh, std::span<const StagePart> parts, int unit) {
    const Sharding& sharding = mesh.sharding;
    const bool is_whole = sharding.keeps_optimizer_whole();
    const int copies = is_whole ? sharding.ranks() : sharding.replicas,
              copy = is_whole ? mesh.data_rank() : mesh.data_rank() / sharding.shards;
    const auto has = [&](const StagePart& part) { return part.has_unit(unit); };
    const auto before = parts.first(static_cast<std::size_t>(mesh.stage()));
    return {std::ranges::count_if(parts, has) * copies, std::ranges::count_if(before, has) * copies + copy};
}

std::vector<UnitCopyIds> lay_out_copy(MemoryLayout& layout, const StoreLayout& store, const Mesh& mesh,
                                      std::span<const StagePart> parts) {
    const Sharding& sharding = store.sharding;
    std::vector<UnitCopyIds> copies(store.units.size());
    for (std::size_t number = 0; number < store.units.size(); ++number) {
        const auto unit = static_cast<int>(number);
        if (!store.part.trains(unit)) continue;
        const std::int64_t all = store.units[number].padded_elements(sharding.ranks()),
                           updated = sharding.keeps_optimizer_whole() ? all : all / sharding.shards,
                           share = writers_of(mesh, parts, unit).largest_share(updated);
        const auto add = [&](const char* what, DType dtype, std::int64_t elements) {
            const std::string name = fmt::format("{}.{}", store.units[number].name(), what);
            copies[number].push_back(layout.add(
                ArenaKind::checkpoint, name, dtype == DType::uint8 ? DType::fp32 : dtype, {elements},
                buffer_alignment, sharding.offload.has_own_memory ? Tier::host : Tier::device));
        };
        add("master", store.dtypes.keeps_master() ? DType::fp32 : store.dtypes.compute, share);
        for (const UnitBufferIds::State& state : store.buffers[number].state) {
            const MemoryLayout::Buffer& values =
                layout.buffers()[static_cast<std::size_t>(state.values.index)];
            add("state", values.dtype, std::min(share, values.shape.elements()));
        }
    }
    return copies;
}

CheckpointCopy::CheckpointCopy(const ParameterStore& store, const Arenas& arenas,
                               std::span<const UnitCopyIds> layout, const Mesh& mesh,
                               std::span<const StagePart> parts)
    : store_(store) {
    for (int unit = 0; unit < store.units(); ++unit) {
        std::vector<Tensor>& buffers = buffers_.emplace_back();
        for (const BufferId& id : layout[static_cast<std::size_t>(unit)]) buffers.push_back(arenas[id]);
        shares_.push_back(store.has(unit)
                              ? writers_of(mesh, parts, unit).share({0, store.updated(unit).size()})
                              : ElementRange{});
    }
}

// State exists only where a tensor's optimizer has it.
std::vector<CheckpointCopy::Held> CheckpointCopy::held(int unit, Kept kept) const {
    const ElementRange& share = shares_[static_cast<std::size_t>(unit)];
    if (kept == Kept::master) return {{share, 0}};
    std::vector<Held> parts;
    std::int64_t place = 0;
    for (const UpdateGroup& group : store_.groups(unit)) {
        const ElementRange part = intersection(share, group.range);
        if (part.size() == 0 || group.optimizer->state.size() < number_of(kept)) continue;
        parts.push_back({part, place});
        place += part.size();
    }
    return parts;
}

std::byte* CheckpointCopy::memory(int unit, Kept kept, std::int64_t place) const {
    const Tensor& buffer = buffers_[static_cast<std::size_t>(unit)][number_of(kept)];
    return buffer.data + static_cast<std::size_t>(place) * size_of(buffer.dtype);
}

void CheckpointCopy::take() const {
    for (int unit = 0; unit < store_.units(); ++unit) {
        for (std::size_t number = 0; number < buffers_[static_cast<std::size_t>(unit)].size(); ++number) {
            const Kept kept = kept_of(number);
            const std::size_t size = size_of(store_.dtype_in_files(unit, kept));
            for (const Held& part : held(unit, kept))
                store_.read_stored(
                    unit, kept, part.elements,
                    {memory(unit, kept, part.place), static_cast<std::size_t>(part.elements.size()) * size});
        }
    }
}

void CheckpointCopy::read(int unit, Kept kept, const ElementRange& run, std::span<std::byte> bytes) const {
    for (const Held& part : held(unit, kept)) {
        if (part.elements.begin > run.begin || part.elements.end < run.end) continue;
        std::memcpy(bytes.data(), memory(unit, kept, part.place + run.begin - part.elements.begin),
                    bytes.size());
        return;
    }
    programming_error("a run of the share");
}

}  // namespace llmc
