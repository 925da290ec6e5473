// Optimizer state on a disk: a unit's state is divided into pieces, which pass through three buffers in memory in turn.
// A piece is [master | state ...] in the file and in a buffer, each from a multiple of ScratchFile::alignment bytes.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "llmc/core/dtype.h"
#include "llmc/core/tensor.h"

namespace llmc {

inline constexpr int state_buffers = 3;

// Bytes in the file and in buffers: a multiple of ScratchFile::alignment.
inline std::uint64_t whole_blocks(std::uint64_t bytes) {
    constexpr std::uint64_t block = 4096;
    return (bytes + block - 1) / block * block;
}

// Elements [begin, end) of those that a rank updates of a unit.
struct StatePiece {
    std::int64_t begin = 0, end = 0;
    std::uint64_t place = 0;  // in the file

    std::int64_t elements() const { return end - begin; }
};

// The elements of a piece: at most 16 pieces a unit, but no fewer than `least`, a power of two.
inline std::int64_t elements_of_piece(std::int64_t updated, std::int64_t least) {
    const auto sixteenth = static_cast<std::uint64_t>((updated + 15) / 16);
    return std::max(least, static_cast<std::int64_t>(std::bit_ceil(sixteenth)));
}
inline int count_of_pieces(std::int64_t updated, std::int64_t least) {
    const std::int64_t size = elements_of_piece(updated, least);
    return static_cast<int>((updated + size - 1) / size);
}

// Where the parts of a piece begin, in bytes.
struct PieceBytes {
    std::size_t master = 0, each_state = 0, all = 0;

    PieceBytes(std::int64_t elements, bool has_master, DType state, int states) {
        const auto bytes = [&](DType dtype) {
            return whole_blocks(static_cast<std::uint64_t>(elements) * size_of(dtype));
        };
        master = has_master ? bytes(DType::fp32) : 0;
        each_state = bytes(state);
        all = master + static_cast<std::size_t>(states) * each_state;
    }
    std::size_t state(std::size_t number) const { return master + number * each_state; }
};

}  // namespace llmc
