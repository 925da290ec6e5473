// The files of a checkpoint that one rank writes: boxes of the tensors that it has, as PyTorch's distributed
// checkpoints. Each element of the model is in one file.
//
//   weights-00002-1.safetensors    rank 2: of each tensor of weights that it writes, the first box
//   state-00002-1.safetensors      the same of the optimizer's state
//   checksums-00002.json           the sizes of these files, and the checksums of their blocks
//
// A file holds at most one box of a tensor; the second ones are in weights-00002-2.safetensors. A file without boxes is
// not written.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "llmc/io/boxes.h"
#include "llmc/parallel/zero/parameter_store.h"

namespace llmc {

// A box in a file. Its elements are a run of those that the rank updates of the unit.
struct OwnBox {
    std::string name;
    int unit;
    Kept kept;
    DType dtype;
    ParamSpec spec;
    Box box;
    ElementRange run;
};
struct OwnFile {
    std::string name;
    std::vector<OwnBox> boxes;
};

// The names of the files begin so.
inline constexpr std::string_view weights_prefix = "weights-", state_files_prefix = "state-",
                                  checksums_prefix = "checksums-";

// The name of a tensor of state in a file: PyTorch's, which begins so.
inline constexpr std::string_view state_prefix = "optim.";
std::string state_name(const std::string& tensor, const StateTensor& state);

// What a rank writes; a pure function of the mesh and the model.
std::vector<OwnFile> plan_own_files(const ParameterStore& store, const ModelPlaces& places, int rank);

// A file that another one names.
struct SealedFile {
    std::uint64_t bytes = 0;
    std::array<char, 32> checksum{};
};

std::string checksums_name(int rank);

// Reads a run of what a rank keeps of the elements that it updates of a unit, in the dtype of files.
using ReadKept =
    std::function<void(int unit, Kept kept, const ElementRange& run, std::span<std::byte> bytes)>;

// Writes the files into an existing folder, durably, and then their checksums. Communicates with no rank. Returns the
// file of checksums; one of no bytes if there is nothing to write. UserError if a file cannot be written.
SealedFile write_own_files(const std::filesystem::path& folder, int rank, std::span<const OwnFile> files,
                           const ReadKept& read);

}  // namespace llmc
