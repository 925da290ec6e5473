// Chooses the activations that blocks recompute for their backward pass instead of keeping them. This saves
// memory and costs time. Results do not change: the same operations on the same rounded inputs give the same
// bits. A matrix that layers of several pipeline stages share is an exception: with recompute, stages may get
// other layers, and the sum of its gradients another order.
#pragma once

#include <cstdint>
#include <string_view>

#include "llmc/core/text.h"

namespace llmc {

enum class RecomputeKind {
    none,       // Blocks keep all activations.
    selective,  // Blocks recompute the outputs of layernorms and GELU, which are cheap.
    block       // Blocks keep only their input.
};
constexpr std::string_view name_of(RecomputeKind kind) {
    return name_among(kind, "none", "selective", "block");
}

struct Recompute {
    RecomputeKind kind = RecomputeKind::none;
    std::int64_t every = 1;  // the last block of each group of this many recomputes

    // How a block recomputes, by its number in the whole model. It does not depend on which blocks a rank
    // has.
    constexpr RecomputeKind of(std::int64_t block) const {
        return block % every == every - 1 ? kind : RecomputeKind::none;
    }
    constexpr bool recomputes(std::int64_t block) const { return of(block) != RecomputeKind::none; }
    bool operator==(const Recompute&) const = default;
};

}  // namespace llmc
