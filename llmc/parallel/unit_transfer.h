// Moves a unit's numbers between one process, which reads and writes files, and the ranks that have them: no process ever
// holds more of them than its own part and one unit.
#pragma once

#include <span>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/device/device.h"
#include "llmc/parallel/mesh.h"
#include "llmc/parallel/parameter_store.h"

namespace llmc {

// All ranks call the same functions in the same order.
class UnitTransfer {
  public:
    // `world` are all ranks of the mesh, talking of host memory; `parts` what each stage has of the model. All outlive the
    // object.
    UnitTransfer(Device& device, const ParameterStore& store, Communicator& world, const Mesh& mesh,
                 std::span<const StagePart> parts)
        : device_(device), store_(store), world_(world), mesh_(mesh), parts_(parts) {}

    // Whether this is the process with the files, rank 0.
    bool is_root() const { return world_.rank() == 0; }

    // On the root a unit's whole flat buffer, fp32, of what ranks update: &UnitBuffers::master, m, v or
    // updated_gradients. Empty elsewhere. It holds until the next call.
    std::span<const float> collect(int unit, Tensor UnitBuffers::*flat);

    // For the root to fill with a unit's whole flat buffer: zeros at first. Empty elsewhere.
    std::span<float> whole(int unit);
    // Of what the root filled, what this rank updates; empty if its stage does not have the unit.
    std::span<const float> distribute(int unit);

  private:
    std::span<float> resized(std::int64_t elements);
    Tensor tensor(const ElementRange& range);
    ElementRange part_of(int unit, int shard) const;

    Device& device_;
    const ParameterStore& store_;
    Communicator& world_;
    Mesh mesh_;
    std::span<const StagePart> parts_;
    std::vector<float> buffer_;
};

}  // namespace llmc
