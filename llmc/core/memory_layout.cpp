#include "llmc/core/memory_layout.h"

#include <numeric>
#include <utility>

#include "llmc/core/text.h"

namespace llmc {

std::string_view name_of(Tier tier) { return name_among(tier, "device", "host", "disk"); }

std::string_view name_of(ArenaKind kind) {
    return name_among(kind, "parameters", "gradients", "master", "moments", "activations", "communication",
                      "pipeline", "workspace", "checkpoint");
}

BufferId MemoryLayout::add(ArenaKind arena, std::string name, DType dtype, const Shape& shape,
                           std::size_t alignment, Tier tier) {
    std::size_t& size = (tier == Tier::host ? host_sizes_ : sizes_).bytes(arena);
    const auto aligned = [unit = static_cast<std::int64_t>(alignment)](std::int64_t bytes) {
        return saturated_product(saturated_sum(bytes, unit - 1) / unit, unit);
    };
    const std::int64_t bytes = saturated_product(shape.elements(), static_cast<std::int64_t>(size_of(dtype)));
    const std::int64_t offset = aligned(static_cast<std::int64_t>(size));
    buffers_.push_back({arena, std::move(name), dtype, shape, static_cast<std::size_t>(offset), tier});
    size = static_cast<std::size_t>(saturated_sum(offset, aligned(bytes)));
    return {static_cast<int>(buffers_.size()) - 1};
}

std::size_t ArenaSizes::total_bytes() const {
    return std::accumulate(bytes_.begin(), bytes_.end(), std::size_t{0}, [](std::size_t a, std::size_t b) {
        return static_cast<std::size_t>(
            saturated_sum(static_cast<std::int64_t>(a), static_cast<std::int64_t>(b)));
    });
}

}  // namespace llmc
