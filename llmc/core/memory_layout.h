// All memory of a run comes from a few named arenas, each allocated once.
//
// A MemoryLayout is made first, by pure functions of (model, mesh, options). Every buffer is added to it with
// its arena, name and size. The header that a run prints shows the bytes of each arena. The Arenas
// (device/device.h) are then allocated from the same layout and hand out the buffers, so the printed sizes
// are the allocated ones.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/tensor.h"

namespace llmc {

// Where something lies: in the device's memory, in the host's beside a GPU, or on a disk. The CPU device's memory is
// that of the host.
enum class Tier { device, host, disk };
std::string_view name_of(Tier tier);

enum class ArenaKind {
    parameters,
    gradients,
    master,
    moments,  // the optimizer's state
    activations,
    communication,
    pipeline,  // buffers for transfers between stages, except the activations that are kept
    workspace,
    checkpoint  // a copy of what is saved; a run can do without it
};
inline constexpr std::array all_arenas = {
    ArenaKind::parameters, ArenaKind::gradients,   ArenaKind::master,
    ArenaKind::moments,    ArenaKind::activations, ArenaKind::communication,
    ArenaKind::pipeline,   ArenaKind::workspace,   ArenaKind::checkpoint};
std::string_view name_of(ArenaKind kind);

// Buffers start at multiples of this many bytes (cuBLASLt's heuristics assume it).
inline constexpr std::size_t buffer_alignment = 256;

// The bytes of each arena. Sums are saturated.
class ArenaSizes {
  public:
    std::size_t bytes(ArenaKind arena) const { return bytes_[static_cast<std::size_t>(arena)]; }
    std::size_t& bytes(ArenaKind arena) { return bytes_[static_cast<std::size_t>(arena)]; }
    std::size_t total_bytes() const;

  private:
    std::array<std::size_t, all_arenas.size()> bytes_{};
};

// Identifies one buffer of a layout.
struct BufferId {
    int index = -1;
};

class MemoryLayout {
  public:
    // The buffer's first byte, and its size, are multiples of `alignment`, itself a multiple of buffer_alignment.
    // It lies in the memory of the device or of the host.
    BufferId add(ArenaKind arena, std::string name, DType dtype, const Shape& shape,
                 std::size_t alignment = buffer_alignment, Tier tier = Tier::device);

    // The arenas of the device. Each buffer is rounded up to its alignment.
    std::size_t bytes(ArenaKind arena) const { return sizes_.bytes(arena); }
    std::size_t total_bytes() const { return sizes_.total_bytes(); }
    const ArenaSizes& sizes() const { return sizes_; }
    const ArenaSizes& host_sizes() const { return host_sizes_; }

    struct Buffer {
        ArenaKind arena;
        std::string name;
        DType dtype;
        Shape shape;
        std::size_t offset;  // bytes from the arena's start
        Tier tier;
    };
    const std::vector<Buffer>& buffers() const { return buffers_; }

  private:
    std::vector<Buffer> buffers_;
    ArenaSizes sizes_, host_sizes_;
};

}  // namespace llmc
