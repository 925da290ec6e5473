// The memory of a MemoryLayout on a device: one allocation an arena, made once.
#pragma once

#include <array>
#include <cstddef>

#include "llmc/core/memory_layout.h"
#include "llmc/core/tensor.h"
#include "llmc/device/device.h"

namespace llmc {

// Zero at first, freed at the end of the object's life.
class Arenas {
  public:
    Arenas(Device& device, MemoryLayout layout);
    ~Arenas();
    Arenas(const Arenas&) = delete;
    Arenas& operator=(const Arenas&) = delete;

    Tensor operator[](BufferId id) const;
    const MemoryLayout& layout() const { return layout_; }

  private:
    Device& device_;
    MemoryLayout layout_;
    std::array<std::byte*, all_arenas.size()> memory_{};
};

}  // namespace llmc
