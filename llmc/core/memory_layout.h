// All memory of a run comes from a few named arenas, each allocated once.
//
// A MemoryLayout is made first, by pure functions of (model, mesh, options): every buffer is added to it with
// its arena, name and size. Its sums are what the header prints. The Arenas (device/arenas.h) are then
// allocated from the same layout and hand the buffers out, so what is printed and what is allocated cannot
// disagree.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/tensor.h"

namespace llmc {

enum class ArenaKind {
    parameters,
    gradients,
    master,
    moments,
    activations,
    communication,
    pipeline,  // what is received and sent between stages, beside the activations that are kept
    workspace
};
inline constexpr std::array all_arenas = {
    ArenaKind::parameters,  ArenaKind::gradients,     ArenaKind::master,   ArenaKind::moments,
    ArenaKind::activations, ArenaKind::communication, ArenaKind::pipeline, ArenaKind::workspace};
std::string_view name_of(ArenaKind kind);

// Buffers start at multiples of this many bytes (cuBLASLt's heuristics assume it).
inline constexpr std::size_t buffer_alignment = 256;

// Names one buffer of a layout.
struct BufferId {
    int index = -1;
};

class MemoryLayout {
  public:
    BufferId add(ArenaKind arena, std::string name, DType dtype, const Shape& shape);

    // Bytes of an arena, each buffer rounded up to buffer_alignment; saturated.
    std::size_t bytes(ArenaKind arena) const { return sizes_[static_cast<std::size_t>(arena)]; }
    std::size_t total_bytes() const;

    struct Buffer {
        ArenaKind arena;
        std::string name;
        DType dtype;
        Shape shape;
        std::size_t offset;  // bytes from the arena's start
    };
    const std::vector<Buffer>& buffers() const { return buffers_; }

  private:
    std::vector<Buffer> buffers_;
    std::array<std::size_t, all_arenas.size()> sizes_{};
};

}  // namespace llmc
