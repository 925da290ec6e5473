// Values of every rank, known to all.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

#include "llmc/comm/communicator.h"

namespace llmc {

// By rank; all give as many. All ranks call it. The bytes of T travel, so that all ranks are programs of one build.
template <class T>
std::vector<T> values_of_ranks(Communicator& ranks, std::span<const T> own) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(static_cast<std::size_t>(ranks.size()) * own.size());
    const Tensor gathered{reinterpret_cast<std::byte*>(all.data()),
                          DType::uint8,
                          {ranks.size(), std::int64_t{sizeof(T)} * std::ssize(own)}};
    std::ranges::copy(own, all.begin() + ranks.rank() * std::ssize(own));
    ranks.all_gather(gathered, gathered.slice(ranks.rank(), 1));
    return all;
}

// One value of each rank.
template <class T>
std::vector<T> values_of_ranks(Communicator& ranks, const T& own) {
    return values_of_ranks(ranks, std::span<const T>(&own, 1));
}

}  // namespace llmc
