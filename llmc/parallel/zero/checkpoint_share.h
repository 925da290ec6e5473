// A rank's share of a checkpoint: which elements it writes, and a copy of them, from which they are written while
// training goes on.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "llmc/core/memory_layout.h"
#include "llmc/device/device.h"
#include "llmc/parallel/mesh.h"
#include "llmc/parallel/pipeline/stage.h"
#include "llmc/parallel/zero/parameter_store.h"

namespace llmc {

// The ranks that update the same elements of a unit, and this rank's number among them. They divide what they write.
struct Writers {
    std::int64_t count = 1, number = 0;

    ElementRange share(const ElementRange& updated) const {
        const auto cut = [&](std::int64_t k) { return updated.begin + updated.size() * k / count; };
        return {cut(number), cut(number + 1)};
    }
    // The most elements of any share.
    std::int64_t largest_share(std::int64_t updated) const { return (updated + count - 1) / count; }
};
// Of mesh.rank, whose stage has the unit. `parts` is each stage's part of the model. Tensor-parallel ranks update
// different elements, though some tensors are whole on all of them.
Writers writers_of(const Mesh& mesh, std::span<const StagePart> parts, int unit);

// The buffers of a unit's copy: master weights, then each tensor of state, in the dtypes of files.
using UnitCopyIds = std::vector<BufferId>;
// For all units; empty ones for those of other stages. In the host's memory beside a device, with equal bytes on all
// ranks of a stage. State is not on a disk.
std::vector<UnitCopyIds> lay_out_copy(MemoryLayout& layout, const StoreLayout& store, const Mesh& mesh,
                                      std::span<const StagePart> parts);

class CheckpointCopy {
  public:
    // All arguments outlive it.
    CheckpointCopy(const ParameterStore& store, const Arenas& arenas, std::span<const UnitCopyIds> layout,
                   const Mesh& mesh, std::span<const StagePart> parts);

    // Copies the rank's share as it is. No update is pending.
    void take() const;
    // What was copied of a run of one tensor, as ParameterStore::read_stored gives it. For any thread.
    void read(int unit, Kept kept, const ElementRange& run, std::span<std::byte> bytes) const;

  private:
    // A part of the share, and where it lies in the buffer.
    struct Held {
        ElementRange elements;
        std::int64_t place;
    };
    std::vector<Held> held(int unit, Kept kept) const;
    std::byte* memory(int unit, Kept kept, std::int64_t place) const;

    const ParameterStore& store_;
    std::vector<std::vector<Tensor>> buffers_;
    std::vector<ElementRange> shares_;  // counted from the first element that the rank updates
};

}  // namespace llmc
