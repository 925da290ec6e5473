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
    const Tensor& own = store_.buffers(unit).*flat;
    check(own.dtype == DType::fp32, "files hold fp32");
    const bool is_whole = store_.sharding().keeps_optimizer_whole();
    if (is_whole && !is_root()) return {};
    resized(is_root() ? store_.elements(unit) : own.elements());
    device_.download(buffer_.data(), own);
    if (is_whole) return buffer_;
    // The root's group has all shards.
    const int shards = store_.sharding().shards;
    if (!is_root()) {
        if (ranks_.rank() < shards) ranks_.send(tensor({0, own.elements()}), 0);
        return {};
    }
    for (int rank = 1; rank < shards; ++rank) ranks_.recv(tensor(store_.shard(unit, rank)), rank);
    return buffer_;
}

std::span<float> UnitTransfer::whole(int unit) {
    if (!is_root()) return {};
    const std::span<float> values = resized(store_.elements(unit));
    std::ranges::fill(values, 0.0F);
    return values;
}

std::span<const float> UnitTransfer::distribute(int unit) {
    const ElementRange own = store_.updated(unit);
    if (!is_root()) resized(own.size());
    if (ranks_.size() > 1) {
        if (store_.sharding().keeps_optimizer_whole()) {
            ranks_.broadcast(tensor({0, own.size()}), 0);
        } else if (is_root()) {
            for (int rank = 1; rank < ranks_.size(); ++rank)
                ranks_.send(tensor(store_.shard(unit, store_.sharding().shard_of(rank))), rank);
        } else {
            ranks_.recv(tensor({0, own.size()}), 0);
        }
    }
    return std::span<const float>(buffer_).first(static_cast<std::size_t>(own.size()));
}

}  // namespace llmc
