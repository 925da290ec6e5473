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

// This rank's share of a tensor, which may be all of it. Ranks with the same share must have equal bytes.
struct TensorShare {
    std::uint64_t hash = 0;
    std::int64_t number = 0;  // the share's number; `none` if this rank has none
    bool operator==(const TensorShare&) const = default;
};
constexpr std::int64_t none = -1;

struct NamedShare {
    std::string name;
    TensorShare share;
};

class Hasher {
  public:
    explicit Hasher(Device& device) : device_(device) {}

    // The hash of a tensor's elements.
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
std::vector<NamedShare> shares_of(Device& device, const ParameterStore& store, int shard) {
    const Sharding& sharding = store.sharding();
    Hasher hash(device);
    std::vector<NamedShare> shares;
    for (int unit = 0; unit < store.units(); ++unit) {
        for (const UnitLayout::Entry& entry : store.layout(unit).entries()) {
            const std::string name = store.layout(unit).full_name(entry.spec);
            const ElementRange tensor{entry.offset, entry.offset + entry.stored.elements()};
            // Adds the tensor's elements in `flat`. A shard may have none.
            const auto add = [&](std::string_view what, Tensor UnitBuffers::*flat, bool is_whole) {
                NamedShare& named =
                    shares.emplace_back(NamedShare{fmt::format("{} {}", what, name), {0, none}});
                if (!store.has(unit)) return;
                const ElementRange range =
                    is_whole ? ElementRange{0, store.elements(unit)} : store.shard(unit, shard);
                const ElementRange part = intersection(tensor, range);
                // Each rank of a tensor-parallel group has its own share.
                const TensorRank ranks = entry.spec.tensor_dim ? store.layout(unit).ranks() : TensorRank{};
                named.share.number = (is_whole ? 0 : shard) * ranks.size + ranks.rank;
                if (part.size() > 0)
                    named.share.hash =
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
            add("first moments", &UnitBuffers::m, whole_state);
            add("second moments", &UnitBuffers::v, whole_state);
        }
    }
    return shares;
}

// The shares of all ranks, in the order of ranks.
std::vector<TensorShare> gather(const std::vector<NamedShare>& shares, Communicator& world) {
    const auto count = std::ssize(shares);
    std::vector<TensorShare> all(static_cast<std::size_t>(count * world.size()));
    // The communicator has no byte type, so the bytes are sent as int32.
    constexpr auto words = static_cast<std::int64_t>(sizeof(TensorShare) / sizeof(std::int32_t));
    const Tensor gathered{
        reinterpret_cast<std::byte*>(all.data()), DType::int32, {world.size(), words * count}};
    std::ranges::transform(shares, all.begin() + world.rank() * count, &NamedShare::share);
    world.all_gather(gathered, gathered.slice(world.rank(), 1));
    return all;
}

// These ranks should have the same hash. Returns those that differ from the most frequent hash. The first
// rank's hash wins a tie.
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
    const std::vector<NamedShare> shares = shares_of(device, store, store.shard());
    const std::vector<TensorShare> all = gather(shares, world);
    for (std::size_t i = 0; i < shares.size(); ++i) {
        struct Replicas {
            std::vector<int> ranks;
            std::vector<std::uint64_t> hashes;
        };
        std::map<std::int64_t, Replicas> replicas_of_share;
        for (int rank = 0; rank < world.size(); ++rank) {
            const TensorShare& share = all[static_cast<std::size_t>(rank) * shares.size() + i];
            if (share.number == none) continue;
            replicas_of_share[share.number].ranks.push_back(rank);
            replicas_of_share[share.number].hashes.push_back(share.hash);
        }
        for (const auto& [_, replicas] : replicas_of_share) {
            const std::vector<int> odd = odd_ones(replicas.ranks, replicas.hashes);
            if (odd.empty()) continue;
            const auto other = std::ranges::find_if(
                replicas.ranks, [&](int rank) { return std::ranges::find(odd, rank) == odd.end(); });
            return fmt::format("the {} of rank{} {} differ from those of rank {}", shares[i].name,
                               odd.size() == 1 ? "" : "s", fmt::join(odd, ", "), *other);
        }
    }
    return std::nullopt;
}

}  // namespace llmc
