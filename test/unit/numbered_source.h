// A source of tokens for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/data/token_source.h"

namespace llmc {

// Shards of given lengths; token i of shard s is 1000 s + i, so that a token tells where it is from.
class NumberedSource final : public TokenSource {
  public:
    explicit NumberedSource(std::vector<std::int64_t> lengths) : lengths_(std::move(lengths)) {}
    std::size_t shards() const override { return lengths_.size(); }
    std::int64_t tokens(std::size_t shard) const override { return lengths_.at(shard); }
    void read(std::size_t shard, std::int64_t first, std::span<std::int32_t> out) const override {
        check(first >= 0 && first + std::ssize(out) <= tokens(shard), "within the shard");
        std::iota(out.begin(), out.end(),
                  static_cast<std::int32_t>(1000 * static_cast<std::int64_t>(shard) + first));
    }

  private:
    std::vector<std::int64_t> lengths_;
};

}  // namespace llmc
