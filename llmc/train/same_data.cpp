#include "llmc/train/same_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/files.h"
#include "llmc/train/outputs.h"

namespace llmc {

namespace {

// Ranks first exchange digests of their data, because the records of thousands of files are long. A digest is 1
// if the rank has data, and then 128 bits in hexadecimal digits.
struct Digest {
    static constexpr std::size_t words = 9;
    std::array<std::int32_t, words> value{};

    bool has_data() const { return value[0] != 0; }
    auto operator<=>(const Digest&) const = default;
};

Digest digest_of(const FoundData& found) {
    Digest digest;
    const std::string sum = checksum_of_text(found.fault.empty() ? to_text(found.record) : found.fault);
    check(sum.size() == sizeof(std::int32_t) * (Digest::words - 1), "a checksum of 128 bits");
    digest.value[0] = found.fault.empty() ? 1 : 0;
    std::memcpy(&digest.value[1], sum.data(), sum.size());
    return digest;
}

std::vector<Digest> gather(Communicator& world, const Digest& own) {
    std::vector<Digest> all(static_cast<std::size_t>(world.size()));
    Digest mine = own;
    const auto words = static_cast<std::int64_t>(Digest::words);
    world.all_gather({reinterpret_cast<std::byte*>(all.data()), DType::int32, {words * world.size()}},
                     {reinterpret_cast<std::byte*>(&mine), DType::int32, {words}});
    return all;
}

// The text of rank `root`, on all ranks.
std::string broadcast(Communicator& world, std::string text, int root) {
    auto bytes = static_cast<std::int32_t>(text.size());
    world.broadcast({reinterpret_cast<std::byte*>(&bytes), DType::int32, {1}}, root);
    const std::int64_t words = (std::int64_t{bytes} + 3) / 4;
    text.resize(static_cast<std::size_t>(4 * words));
    world.broadcast({reinterpret_cast<std::byte*>(text.data()), DType::int32, {words}}, root);
    text.resize(static_cast<std::size_t>(bytes));
    return text;
}

// The first rank among those that have data and agree with most others; 0 if none has data.
int rank_of_majority(const std::vector<Digest>& digests) {
    std::map<Digest, int> ranks;
    int most = 0, chosen = 0;
    for (const Digest& digest : digests) most = std::max(most, digest.has_data() ? ++ranks[digest] : 0);
    while (most > 0 && ranks[digests[static_cast<std::size_t>(chosen)]] < most) ++chosen;
    return chosen;
}

}  // namespace

FoundData find_data(const std::function<DataRecord()>& open) {
    try {
        return {.record = open(), .fault = ""};
    } catch (const UserError& fault) {
        return {.record = {}, .fault = fault.what()};
    }
}

void require_same_data(Communicator& world, const FoundData& found) {
    const std::vector<Digest> digests = gather(world, digest_of(found));
    const int chosen = rank_of_majority(digests);
    const Digest& expected = digests[static_cast<std::size_t>(chosen)];
    const auto of = [&](int rank) -> const Digest& { return digests[static_cast<std::size_t>(rank)]; };
    std::optional<DataRecord> others;
    for (int rank = 0; rank < world.size(); ++rank) {
        if (of(rank) == expected) continue;
        if (!expected.has_data()) break;
        if (!others) others = data_record(broadcast(world, to_text(found.record), chosen));
        const std::string told =
            broadcast(world, of(rank).has_data() ? to_text(found.record) : found.fault, rank);
        if (!of(rank).has_data())
            user_error("rank {} cannot read the data that rank {} reads: {}", rank, chosen, told);
        const std::string what = difference(data_record(told), *others);
        if (!what.empty())
            user_error("rank {} reads other data than rank {}: {}; give all processes the same files", rank,
                       chosen, what);
    }
    if (!found.fault.empty()) throw UserError(found.fault);
}

std::vector<std::string> compare_with_checkpoint(const DataRecord& record, const CheckpointInfo& checkpoint,
                                                 const Options& options) {
    std::vector<std::string> notes;
    if (checkpoint.data.empty()) return notes;
    const DataRecord then = data_record(checkpoint.data);
    const auto difference_of = [&](const std::string& option) {
        const auto here = record.find(option), there = then.find(option);
        return here == record.end() || there == then.end()
                   ? ""
                   : difference(DataRecord{*here}, DataRecord{*there});
    };
    const bool trains = has_steps_to_train(options, checkpoint);
    const auto refuse = [&](const char* use, const std::string& what) {
        user_error("{} {} other data: {}; give the same data, or --new-data to go on with these",
                   checkpoint.directory.string(), use, what);
    };
    if (const std::string what = difference_of("train-data"); !what.empty()) {
        if (trains && !options.new_data) refuse("was trained on", what);
        if (trains)
            notes.push_back(fmt::format("{}; training goes on after {}, in the order of the new data", what,
                                        plural(checkpoint.progress.samples, "sample")));
        else if (options.steps > 0)
            notes.push_back(
                fmt::format("{}; to train on with these, give --new-data and more --steps", what));
    }
    if (const std::string what = difference_of("val-data"); !what.empty()) {
        if (trains && options.keep_best && !options.new_data) refuse("was validated on", what);
        notes.push_back(fmt::format("{}; validation losses before and after are not comparable", what));
    }
    return notes;
}

}  // namespace llmc
