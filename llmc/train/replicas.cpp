#include "llmc/train/replicas.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

namespace llmc {

namespace {

// A part of the model that a rank has, and which others have: those of the same color.
struct Part {
    std::string name;
    std::uint64_t hash;
    bool of_all;  // or of the ranks with the same shard
};

class Hasher {
  public:
    explicit Hasher(Device& device) : device_(device) {}

    // Of some elements of a tensor.
    std::uint64_t operator()(const Tensor& tensor) {
        bytes_.resize(tensor.bytes());
        device_.download(bytes_.data(), tensor);
        return XXH3_64bits(bytes_.data(), bytes_.size());
    }

  private:
    Device& device_;
    std::vector<std::byte> bytes_;
};

std::vector<Part> parts_of(Device& device, const ParameterStore& store) {
    const Sharding& sharding = store.sharding();
    Hasher hash(device);
    std::vector<Part> parts;
    for (int unit = 0; unit < store.units(); ++unit) {
        const UnitBuffers& buffers = store.buffers(unit);
        for (const UnitLayout::Entry& entry : store.layout(unit).entries()) {
            const std::string name = store.layout(unit).full_name(entry.spec);
            const ElementRange tensor{entry.offset, entry.offset + entry.spec.stored_shape().elements()};
            // Of what this rank updates; it may have nothing of a tensor.
            const ElementRange own = store.updated(unit), part = intersection(tensor, own);
            const auto add = [&](std::string_view what, const Tensor& flat) {
                parts.push_back({fmt::format("{} {}", what, name),
                                 part.size() == 0 ? 0 : hash(flat.flat(part.begin - own.begin, part.size())),
                                 sharding.keeps_optimizer_whole()});
            };
            if (sharding.keeps_parameters_whole()) {
                parts.push_back(
                    {"parameters " + name, hash(buffers.parameters.flat(tensor.begin, tensor.size())), true});
            } else {
                add("parameters", buffers.parameter_shard);
            }
            // In fp32 the parameters are their own master weights.
            if (buffers.master.data != buffers.updated_parameters.data) add("master weights", buffers.master);
            add("moments", buffers.m);
            add("second moments", buffers.v);
        }
    }
    return parts;
}

// All ranks' hashes, rank by rank.
std::vector<std::uint64_t> gather(const std::vector<Part>& parts, Communicator& data) {
    const auto count = std::ssize(parts);
    std::vector<std::uint64_t> all(static_cast<std::size_t>(count * data.size()));
    // Bytes, for the communicator: as pairs of int32.
    const Tensor gathered{reinterpret_cast<std::byte*>(all.data()), DType::int32, {data.size(), 2 * count}};
    std::ranges::transform(parts, all.begin() + data.rank() * count, &Part::hash);
    data.all_gather(gathered, gathered.slice(data.rank(), 1));
    return all;
}

// Of ranks that should have the same hash, those that do not have the one that most have; the first rank's if no other
// has more.
std::vector<int> odd_ones(const std::vector<int>& ranks, const std::vector<std::uint64_t>& hashes) {
    std::map<std::uint64_t, int> counts;
    for (const std::uint64_t hash : hashes) ++counts[hash];
    std::uint64_t usual = hashes.front();
    for (const auto& [hash, count] : counts) {
        if (count > counts[usual]) usual = hash;
    }
    std::vector<int> odd;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
        if (hashes[i] != usual) odd.push_back(ranks[i]);
    }
    return odd;
}

}  // namespace

std::optional<std::string> differing_replica(Device& device, const ParameterStore& store,
                                             Communicator& data) {
    const std::vector<Part> parts = parts_of(device, store);
    const std::vector<std::uint64_t> all = gather(parts, data);
    const Sharding& sharding = store.sharding();
    for (std::size_t i = 0; i < parts.size(); ++i) {
        for (int color = 0; color < (parts[i].of_all ? 1 : sharding.shards); ++color) {
            std::vector<int> ranks;
            std::vector<std::uint64_t> hashes;
            for (int rank = 0; rank < data.size(); ++rank) {
                if (!parts[i].of_all && sharding.shard_of(rank) != color) continue;
                ranks.push_back(rank);
                hashes.push_back(all[static_cast<std::size_t>(rank) * parts.size() + i]);
            }
            const std::vector<int> odd = odd_ones(ranks, hashes);
            if (odd.empty()) continue;
            const auto other = std::ranges::find_if(
                ranks, [&](int rank) { return std::ranges::find(odd, rank) == odd.end(); });
            return fmt::format("the {} of rank{} {} differ from those of rank {}", parts[i].name,
                               odd.size() == 1 ? "" : "s", fmt::join(odd, ", "), *other);
        }
    }
    return std::nullopt;
}

}  // namespace llmc
