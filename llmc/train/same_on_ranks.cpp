#include "llmc/train/same_on_ranks.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <vector>

#include "llmc/comm/texts_of_ranks.h"
#include "llmc/comm/values_of_ranks.h"
#include "llmc/core/error.h"
#include "llmc/io/files.h"

namespace llmc {

namespace {

// Ranks first exchange digests, because the records of thousands of files are long. A digest is 1 if the text is
// valid, and then 128 bits in hexadecimal digits.
struct Digest {
    static constexpr std::size_t words = 9;
    std::array<std::int32_t, words> value{};

    bool is_valid() const { return value[0] != 0; }
    auto operator<=>(const Digest&) const = default;
};

Digest digest_of(const RankText& own) {
    Digest digest;
    const std::string sum = checksum_of_text(own.text);
    check(sum.size() == sizeof(std::int32_t) * (Digest::words - 1), "a checksum of 128 bits");
    digest.value[0] = own.valid ? 1 : 0;
    std::memcpy(&digest.value[1], sum.data(), sum.size());
    return digest;
}

// The first rank among those that have a valid text and agree with most others; 0 if none has one.
int rank_of_majority(const std::vector<Digest>& digests) {
    std::map<Digest, int> ranks;
    int most = 0, chosen = 0;
    for (const Digest& digest : digests) most = std::max(most, digest.is_valid() ? ++ranks[digest] : 0);
    while (most > 0 && ranks[digests[static_cast<std::size_t>(chosen)]] < most) ++chosen;
    return chosen;
}

}  // namespace

void for_each_different_rank(Communicator& world, const RankText& own,
                             const std::function<void(const DifferentRank&)>& see) {
    if (world.size() == 1) return;
    const std::vector<Digest> digests = values_of_ranks(world, digest_of(own));
    const int chosen = rank_of_majority(digests);
    const auto of = [&](int rank) -> const Digest& { return digests[static_cast<std::size_t>(rank)]; };
    if (!of(chosen).is_valid()) return;
    std::optional<std::string> expected;
    for (int rank = 0; rank < world.size(); ++rank) {
        if (of(rank) == of(chosen)) continue;
        if (!expected) expected = broadcast_text(world, own.text, chosen);
        see({.rank = rank,
             .has = {.text = broadcast_text(world, own.text, rank), .valid = of(rank).is_valid()},
             .other = chosen,
             .other_has = *expected});
    }
}

}  // namespace llmc
