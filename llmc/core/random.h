// Counter-based random numbers (Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// 2011).
//
// Random numbers do not depend on the mesh. A number is a pure function of (seed, stream, index), so every
// rank can compute any of them without communication. A stream is identified by a name: the tensor's name for
// initial weights, otherwise the purpose ("permutation", "stories").
#pragma once

#include <Random123/philox.h>
#include <xxhash.h>

#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

namespace llmc {

class RandomStream {
  public:
    RandomStream(std::uint64_t seed, std::string_view name)
        : seed_(seed), stream_(XXH64(name.data(), name.size(), 0)) {}

    // 64 random bits for an index.
    std::uint64_t bits(std::uint64_t index) const {
        const auto r = block(index);
        return (std::uint64_t{r[1]} << 32) | r[0];
    }

    // Uniform in [0, 1) with 53 bits.
    double uniform(std::uint64_t index) const { return static_cast<double>(bits(index) >> 11) * 0x1p-53; }

    // Uniform in 0 ... n-1, with a negligible bias (n / 2^64).
    std::uint64_t below(std::uint64_t index, std::uint64_t n) const {
        return static_cast<std::uint64_t>((static_cast<unsigned __int128>(bits(index)) * n) >> 64);
    }

    // Standard normal (Box-Muller).
    double normal(std::uint64_t index) const {
        const auto r = block(index);
        const double u = (static_cast<double>(r[0]) + 0.5) * 0x1p-32;
        const double v = (static_cast<double>(r[1]) + 0.5) * 0x1p-32;
        return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
    }

  private:
    r123::Philox4x32::ctr_type block(std::uint64_t index) const {
        const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
        const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
        return r123::Philox4x32{}({{low(index), high(index), low(stream_), high(stream_)}},
                                  {{low(seed_), high(seed_)}});
    }

    std::uint64_t seed_;
    std::uint64_t stream_;
};

}  // namespace llmc
