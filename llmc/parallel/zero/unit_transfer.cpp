// Sends and receives units one at a time, and merges the tensors of tensor-parallel ranks.
#include "llmc/parallel/zero/unit_transfer.h"

#include <algorithm>

#include "llmc/core/error.h"

namespace llmc {

namespace {

// A range of a buffer as a tensor for the communicator.
Tensor tensor(std::vector<float>& buffer, const ElementRange& range) {
    return {reinterpret_cast<std::byte*>(buffer.data() + range.begin), DType::fp32, {range.size()}};
}

std::span<float> resized(std::vector<float>& buffer, std::int64_t elements) {
    buffer.resize(static_cast<std::size_t>(elements));
    return buffer;
}

}  // namespace

UnitTransfer::UnitTransfer(const ParameterStore& store, Communicator& world, const Mesh& mesh,
                           std::span<const StagePart> parts)
    : store_(store), world_(world), mesh_(mesh), parts_(parts) {
    for (const UnitLayout& layout : store.layouts()) units_.emplace_back(layout.spec());
}

// The root's buffer for one tensor-parallel rank's part of the unit; without tensor parallelism, the whole
// unit's.
std::vector<float>& UnitTransfer::part() { return mesh_.tensor == 1 ? whole_ : own_; }

// Copies one tensor-parallel rank's flat buffer into the whole unit.
void UnitTransfer::take_part(int unit, int tensor_rank) {
    if (mesh_.tensor == 1) return;
    const UnitLayout& whole = units_[static_cast<std::size_t>(unit)];
    const UnitLayout part(whole.spec(), {tensor_rank, mesh_.tensor});
    for (const UnitLayout::Entry& entry : part.entries()) {
        const auto same = std::ranges::find_if(whole.entries(), [&](const UnitLayout::Entry& other) {
            return other.spec.name == entry.spec.name;
        });
        for (const TensorRun& run : runs_of(entry, part.ranks())) {
            std::copy_n(own_.data() + entry.offset + run.own, run.size,
                        whole_.data() + same->offset + run.whole);
        }
    }
}

std::span<const float> UnitTransfer::collect(int unit, Kept kept) {
    // The first group of the first stage that has the unit holds all shards.
    const auto has = [&](const StagePart& part) { return part.has_unit(unit); };
    const auto stage = static_cast<int>(std::ranges::find_if(parts_, has) - parts_.begin());
    const int shards = store_.sharding().keeps_optimizer_whole() ? 1 : store_.sharding().shards;
    const bool gives = mesh_.stage() == stage && mesh_.data_rank() < shards;
    const auto download = [&](std::vector<float>& to) {
        store_.read(unit, kept, std::span(to).first(static_cast<std::size_t>(store_.updated(unit).size())));
    };
    if (!is_root()) {
        if (!gives) return {};
        resized(own_, store_.updated(unit).size());
        download(own_);
        world_.send(tensor(own_, {0, std::ssize(own_)}), 0);
        return {};
    }
    const std::int64_t elements =
        mesh_.tensor == 1 ? store_.elements(unit) : units_[static_cast<std::size_t>(unit)].padded_elements(1);
    std::ranges::fill(resized(whole_, elements), 0.0F);
    for (int tensor_rank = 0; tensor_rank < mesh_.tensor; ++tensor_rank) {
        resized(part(), store_.elements(unit));
        for (int shard = 0; shard < shards; ++shard) {
            const int rank = mesh_.rank_of(stage, shard, tensor_rank);
            if (rank == 0) {
                download(part());
            } else {
                world_.recv(tensor(part(), part_of(unit, shard)), rank);
            }
        }
        take_part(unit, tensor_rank);
    }
    return whole_;
}

// The elements that a rank with this shard updates.
ElementRange UnitTransfer::part_of(int unit, int shard) const {
    return store_.sharding().keeps_optimizer_whole() ? ElementRange{0, store_.elements(unit)}
                                                     : store_.shard(unit, shard);
}

}  // namespace llmc
