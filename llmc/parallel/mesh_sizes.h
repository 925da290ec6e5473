// Which meshes fit the processes and the model, and what is said of one that does not: with sizes that do, all of which are
// found here. Whether a mesh divides the global batch is checked elsewhere (plan/micro_batches.h), as are schedules
// (pipeline_schedule.h).
#pragma once

#include <cstdint>
#include <optional>

#include "llmc/model/model.h"

namespace llmc {

struct MeshSizes {
    std::optional<std::int64_t> processes{};  // nothing: as many as the mesh takes
    std::int64_t pipeline = 1, virtual_stages = 1, tensor = 1;
    bool sequence_parallel = false;
    // Of the global batch, which data-parallel ranks share: what is advised divides it, where anything does.
    std::optional<std::int64_t> batch_sequences{};
};

// Whether the processes divide into stages and these among tensor-parallel ranks, each chunk has a layer, and heads (with
// sequence parallelism tokens too) divide among such ranks.
bool fits(const MeshSizes& sizes, const Model& model);

// UserError that names the option and sizes of it that fit together with the others, if a mesh does not. Of several chunks a
// stage for which there are too few layers check_chunks says more.
void check_mesh_sizes(const MeshSizes& sizes, const Model& model);

}  // namespace llmc
