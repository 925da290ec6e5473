#include "llmc/parallel/unit_transfer.h"

#include <algorithm>

#include "llmc/core/error.h"

namespace llmc {

std::span<float> UnitTransfer::resized(std::int64_t elements) {
    buffer_.resize(static_cast<std::size_t>(elements));
    return buffer_;
}

// A part of the buffer, for the communicator.
Tensor UnitTransfer::tensor(const ElementRange& range) {
    return {reinterpret_cast<std::byte*>(buffer_.data() + range.begin), DType::fp32, {range.size()}};
}

std::span<const float> UnitTransfer::collect(int unit, Tensor UnitBuffers::*flat) {
    // Of the first stage that has it, the first group has all shards.
    const auto has = [&](const StagePart& part) { return part.has_unit(unit); };
    const auto stage = static_cast<int>(std::ranges::find_if(parts_, has) - parts_.begin());
    const int shards = store_.sharding().keeps_optimizer_whole() ? 1 : store_.sharding().shards;
    const bool gives = mesh_.stage() == stage && mesh_.data_rank() < shards;
    if (!is_root() && !gives) return {};
    resized(is_root() ? store_.elements(unit) : store_.updated(unit).size());
    if (gives) {
        const Tensor& own = store_.buffers(unit).*flat;
        check(own.dtype == DType::fp32, "files hold fp32");
        device_.download(buffer_.data(), own);
    }
    if (!is_root()) {
        world_.send(tensor({0, std::ssize(buffer_)}), 0);
        return {};
    }
    for (int shard = 0; shard < shards; ++shard) {
        const int rank = mesh_.rank_of(stage, shard, 0);
        if (rank != 0) world_.recv(tensor(part_of(unit, shard)), rank);
    }
    return buffer_;
}

std::span<float> UnitTransfer::whole(int unit) {
    if (!is_root()) return {};
    const std::span<float> values = resized(store_.elements(unit));
    std::ranges::fill(values, 0.0F);
    return values;
}

std::span<const float> UnitTransfer::distribute(int unit) {
    const std::int64_t own = store_.has(unit) ? store_.updated(unit).size() : 0;
    if (!is_root()) {
        resized(own);
        if (own > 0) world_.recv(tensor({0, own}), 0);
        return buffer_;
    }
    for (int rank = 1; rank < world_.size(); ++rank) {
        Mesh there = mesh_;
        there.rank = rank;
        if (parts_[static_cast<std::size_t>(there.stage())].has_unit(unit))
            world_.send(tensor(part_of(unit, there.shard())), rank);
    }
    return std::span<const float>(buffer_).first(static_cast<std::size_t>(own));
}

// What a rank updates that has this shard.
ElementRange UnitTransfer::part_of(int unit, int shard) const {
    return store_.sharding().keeps_optimizer_whole() ? ElementRange{0, store_.elements(unit)}
                                                     : store_.shard(unit, shard);
}

}  // namespace llmc
