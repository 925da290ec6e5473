// Brings a unit's values to rank 0, which exports them, from the ranks that hold them. No process ever holds more of
// them than its own part and one unit.
#pragma once

#include <span>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/parallel/mesh.h"
#include "llmc/parallel/zero/parameter_store.h"

namespace llmc {

// All ranks call the same functions in the same order.
class UnitTransfer {
  public:
    // `world` has all ranks of the mesh and transfers host memory. `parts` is each stage's part of the model.
    // All outlive the object.
    UnitTransfer(const ParameterStore& store, Communicator& world, const Mesh& mesh,
                 std::span<const StagePart> parts);

    Communicator& world() const { return world_; }
    const Mesh& mesh() const { return mesh_; }
    std::span<const StagePart> parts() const { return parts_; }

    // The layouts of the units' whole flat buffers.
    std::span<const UnitLayout> units() const { return units_; }

    // Whether this is the process that writes the files.
    bool is_root() const { return world_.rank() == 0; }

    // Returns on the root a unit's whole flat buffer in fp32, of what ranks keep of the elements that they update.
    // Returns an empty span elsewhere. Valid until the next call.
    std::span<const float> collect(int unit, Kept kept);

  private:
    ElementRange part_of(int unit, int shard) const;
    std::vector<float>& part();
    void take_part(int unit, int tensor_rank);

    const ParameterStore& store_;
    Communicator& world_;
    Mesh mesh_;
    std::span<const StagePart> parts_;
    std::vector<UnitLayout> units_;
    std::vector<float> own_;  // a rank's own part, or on the root a tensor-parallel rank's flat buffer
    std::vector<float> whole_;
};

}  // namespace llmc
