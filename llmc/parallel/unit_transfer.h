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
                 std::span<const StagePart> parts);

    // Where the tensors lie in a whole unit's flat buffer.
    std::span<const UnitLayout> units() const { return units_; }

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
    ElementRange part_of(int unit, int shard) const;
    std::vector<float>& part();
    void copy_part(int unit, int tensor_rank, bool from_whole);

    Device& device_;
    const ParameterStore& store_;
    Communicator& world_;
    Mesh mesh_;
    std::span<const StagePart> parts_;
    std::vector<UnitLayout> units_;
    std::vector<float> own_;  // what a rank has, or on the root a tensor-parallel rank's flat buffer
    std::vector<float> whole_;
};

}  // namespace llmc
