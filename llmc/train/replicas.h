// What ranks must have alike, compared: a difference is a fault of the memory, of a link, or of the program.
#pragma once

#include <optional>
#include <string>

#include "llmc/comm/communicator.h"
#include "llmc/device/device.h"
#include "llmc/parallel/parameter_store.h"

namespace llmc {

// The first tensor that a rank has otherwise than those that have it too, by hashes of its bytes: "the parameters
// h.1.mlp.c_fc.weight of rank 2 differ from those of rank 0". Whole parameters are compared over all ranks, and shards,
// with the optimizer's state, over the groups of hybrid sharding. Of two ranks that differ the later one is named, of
// more those that differ from most. All ranks of `data` call it and receive the same answer.
std::optional<std::string> differing_replica(Device& device, const ParameterStore& store,
                                             Communicator& world);

}  // namespace llmc
