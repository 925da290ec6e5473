// The one loader: brings tensors of files to the ranks that have them, on any mesh. One process reads and verifies a
// block of a file and sends its parts on; all together read each block once. No process holds more of the model than
// its own part, a window of a unit, and a few blocks.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "llmc/comm/communicator.h"
#include "llmc/io/boxes.h"
#include "llmc/io/stored_tensors.h"
#include "llmc/parallel/zero/parameter_store.h"

namespace llmc {

// A tensor of the files, and what it is for. `compared`: it must have the numbers of the tensor's weights.
struct WantedTensor {
    std::string name;  // in the files
    const StoredTensor* stored;
    int unit;
    std::size_t entry;  // of the unit's layout
    Kept kept = Kept::master;
    bool is_compared = false;
};

// Sets weights and state of all ranks. What is wanted of a unit is set together. All ranks call it with the same
// arguments, and all throw the same UserError: if a file cannot be read, does not have its checksum, or has a number
// that is not finite; and `differs` if tensors that are compared differ. With `mends`, numbers of state are corrected
// (Optimizer::mend). Returns a checksum of the frozen weights among them, by the tensors' names in the model and their
// numbers in fp32: a sum over the elements, and so the same for any files and any mesh.
std::string load_tensors(const StoredTensors& files, std::span<const WantedTensor> wanted,
                         const ModelPlaces& places, ParameterStore& store, Communicator& world,
                         bool mends = false, const std::string& differs = "");

}  // namespace llmc
