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

// A tensor, or what a rank has of it. Ranks have the same where they have the same share of it.
struct TensorPart {
    std::uint64_t hash = 0;
    std::int64_t share = 0;  // of the ranks that have some: which part of it; `none` of the others
    bool operator==(const TensorPart&) const = default;
};
constexpr std::int64_t none = -1;

struct NamedPart {
    std::string name;
    TensorPart part;
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

// The same list of names on all ranks.
std::vector<NamedPart> parts_of(Device& device, const ParameterStore& store, int shard) {
    const Sharding& sharding = store.sharding();
    Hasher hash(device);
    std::vector<NamedPart> parts;
    for (int unit = 0; unit < store.units(); ++unit) {
        for (const UnitLayout::Entry& entry : store.layout(unit).entries()) {
            const std::string name = store.layout(unit).full_name(entry.spec);
            const ElementRange tensor{entry.offset, entry.offset + entry.stored.elements()};
            // Of `flat`, which has these elements of the unit. A shard may have nothing of a tensor.
            const auto add = [&](std::string_view what, Tensor UnitBuffers::*flat, bool is_whole) {
                NamedPart& named = parts.emplace_back(NamedPart{fmt::format("{} {}", what, name), {0, none}});
                if (!store.has(unit)) return;
                const ElementRange range =
                    is_whole ? ElementRange{0, store.elements(unit)} : store.shard(unit, shard);
                const ElementRange part = intersection(tensor, range);
                // Ranks that share the tensor have other numbers each.
                const TensorRank ranks = entry.spec.tensor_dim ? store.layout(unit).ranks() : TensorRank{};
                named.part.share = (is_whole ? 0 : shard) * ranks.size + ranks.rank;
                if (part.size() > 0)
                    named.part.hash =
                        hash((store.buffers(unit).*flat).flat(part.begin - range.begin, part.size()));
            };
            const bool whole_state = sharding.keeps_optimizer_whole();
            if (sharding.keeps_parameters_whole()) {
                add("parameters", &UnitBuffers::parameters, true);
            } else {
                add("parameters", &UnitBuffers::parameter_shard, false);
            }
            // In fp32 the parameters are their own master weights.
            if (store.dtype() != DType::fp32) add("master weights", &UnitBuffers::master, whole_state);
            add("moments", &UnitBuffers::m, whole_state);
            add("second moments", &UnitBuffers::v, whole_state);
        }
    }
    return parts;
}

// All ranks' parts, rank by rank.
std::vector<TensorPart> gather(const std::vector<NamedPart>& parts, Communicator& world) {
    const auto count = std::ssize(parts);
    std::vector<TensorPart> all(static_cast<std::size_t>(count * world.size()));
    // Bytes, for the communicator: as int32.
    constexpr auto words = static_cast<std::int64_t>(sizeof(TensorPart) / sizeof(std::int32_t));
    const Tensor gathered{
        reinterpret_cast<std::byte*>(all.data()), DType::int32, {world.size(), words * count}};
    std::ranges::transform(parts, all.begin() + world.rank() * count, &NamedPart::part);
    world.all_gather(gathered, gathered.slice(world.rank(), 1));
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
                                             Communicator& world) {
    const std::vector<NamedPart> parts = parts_of(device, store, store.shard());
    const std::vector<TensorPart> all = gather(parts, world);
    for (std::size_t i = 0; i < parts.size(); ++i) {
        struct Share {
            std::vector<int> ranks;
            std::vector<std::uint64_t> hashes;
        };
        std::map<std::int64_t, Share> shares;
        for (int rank = 0; rank < world.size(); ++rank) {
            const TensorPart& part = all[static_cast<std::size_t>(rank) * parts.size() + i];
            if (part.share == none) continue;
            shares[part.share].ranks.push_back(rank);
            shares[part.share].hashes.push_back(part.hash);
        }
        for (const auto& [_, share] : shares) {
            const std::vector<int> odd = odd_ones(share.ranks, share.hashes);
            if (odd.empty()) continue;
            const auto other = std::ranges::find_if(
                share.ranks, [&](int rank) { return std::ranges::find(odd, rank) == odd.end(); });
            return fmt::format("the {} of rank{} {} differ from those of rank {}", parts[i].name,
                               odd.size() == 1 ? "" : "s", fmt::join(odd, ", "), *other);
        }
    }
    return std::nullopt;
}

}  // namespace llmc
