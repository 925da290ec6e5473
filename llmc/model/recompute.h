// Which activations blocks do not keep, but make again for their backward pass: memory for time. That is all it changes:
// the same operations on the same rounded inputs give the same bits.
#pragma once

#include <cstdint>
#include <string_view>

#include "llmc/core/names.h"

namespace llmc {

enum class RecomputeKind {
    none,       // all are kept
    selective,  // but for the layernorms' and GELU's outputs, which take little to make again
    block       // none is, beside the block's input
};
constexpr std::string_view name_of(RecomputeKind kind) {
    return name_among(kind, "none", "selective", "block");
}

struct Recompute {
    RecomputeKind kind = RecomputeKind::none;
    std::int64_t every = 1;  // of so many blocks the last one recomputes

    // What a block does, by its number in the whole model, whichever part of that a rank has.
    constexpr RecomputeKind of(std::int64_t block) const {
        return block % every == every - 1 ? kind : RecomputeKind::none;
    }
    constexpr bool recomputes(std::int64_t block) const { return of(block) != RecomputeKind::none; }
    bool operator==(const Recompute&) const = default;
};

}  // namespace llmc
