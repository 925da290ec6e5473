// Compares state that ranks hold copies of. A difference means faulty memory, a faulty link, or a bug.
#pragma once

#include <optional>
#include <string>

#include "llmc/comm/communicator.h"
#include "llmc/device/device.h"
#include "llmc/parallel/zero/parameter_store.h"

namespace llmc {

// Finds the first tensor whose copies differ, by hashes of their bytes: "the parameters h.1.mlp.c_fc.weight
// of rank 2 differ from those of rank 0". Whole tensors are compared over all ranks that hold them, and
// shards over the ranks with the same shard (of the data-parallel and of the tensor-parallel group). The
// answer names the ranks that differ from the majority; of two ranks, the later one. All ranks of `world`
// call it and get the same answer.
std::optional<std::string> differing_replica(Device& device, const ParameterStore& store,
                                             Communicator& world);

}  // namespace llmc
