// Checks that a mesh fits the processes and the model. If not, the error message names sizes that fit. Two
// checks are elsewhere: that the mesh divides the global batch (plan/micro_batches.h), and schedules
// (pipeline_schedule.h).
#pragma once

#include <cstdint>
#include <optional>

#include "llmc/model/model.h"

namespace llmc {

struct MeshSizes {
    std::optional<std::int64_t> processes{};  // unset: as many as the mesh needs
    std::int64_t pipeline = 1, virtual_stages = 1, tensor = 1;
    bool sequence_parallel = false;
    // Sequences in the global batch, which data-parallel ranks share. Suggested sizes divide it, if any do.
    std::optional<std::int64_t> batch_sequences{};
};

// Whether a mesh fits. The processes divide into stages, and each stage into tensor-parallel groups. Each
// chunk has a layer. The tensor-parallel ranks divide the heads, and with sequence parallelism also the
// tokens.
bool fits(const MeshSizes& sizes, const Model& model);

// Throws a UserError if a mesh does not fit. The message names the option, and sizes of it that fit with the
// other options. check_chunks (pipeline_schedule.h) checks several chunks per stage; its message is more
// precise if there are too few layers.
void check_mesh_sizes(const MeshSizes& sizes, const Model& model);

}  // namespace llmc
