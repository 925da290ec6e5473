// The model's tensors in safetensors files, with Hugging Face's names and shapes. Hugging Face's tools can
// read exported files, and this program can read Hugging Face's models. Files hold the embedding without
// padding (V rows), in fp32.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/io/safetensors.h"
#include "llmc/io/stored_tensors.h"
#include "llmc/parallel/zero/parameter_store.h"
#include "llmc/parallel/zero/unit_transfer.h"

namespace llmc {

// The tensors of a model with adapters (model/low_rank.h), which lie in different files: its own, and those of the
// adapters. Other models have no adapters.
enum class Tensors : std::uint8_t { weights, adapters };

// All ranks save and load. Only the root of the transfer writes an export.

// Saves what ranks keep of every unit: Kept::master or ::gradients, fp32. With `sync`, the root returns only when
// the file is on the storage device.
void save_tensors(const std::filesystem::path& file, const ParameterStore& store, UnitTransfer& transfer,
                  Kept kept, bool sync, Tensors tensors = Tensors::weights);
inline void save_weights(const std::filesystem::path& file, const ParameterStore& store,
                         UnitTransfer& transfer, bool sync) {
    save_tensors(file, store, transfer, Kept::master, sync);
}

// What collect_weights() gives: the tensors of one kind; or, `merged`, the weights with s B A of the adapters added to
// them, in fp32. `originals`: the files that have the weights, which are then taken from there, but not, with
// `keeps_nf4`, those that ranks keep in 4 bits; null: all that ranks keep.
struct Collected {
    Tensors tensors = Tensors::weights;
    std::optional<double> merged{};  // s
    const StoredTensors* originals = nullptr;
    bool keeps_nf4 = false;
};
// The tensors, in the order in which collect_weights() calls f(name, values) with each on the root. `dtype` is the
// format's name of that of the file.
std::vector<SafetensorsEntry> weights_table(const ParameterStore& store, const UnitTransfer& transfer,
                                            const char* dtype, Tensors tensors = Tensors::weights);
using SeeTensor = std::function<void(const std::string& name, std::span<const float> values)>;
void collect_weights(const ParameterStore& store, UnitTransfer& transfer, const Collected& what,
                     const SeeTensor& f);

struct CheckedWeights {
    std::vector<std::string> notes;  // for the user
    DType dtype;                     // bf16 or fp16 if all the model's tensors have it, else fp32
};
// Checks the names and shapes of the stored tensors against a model with these units. UserError if they do not match.
CheckedWeights check_weights(const StoredTensors& stored, const Outline& outline,
                             std::span<const UnitLayout> units, Tensors tensors = Tensors::weights);

// Loads weights from F32, F16, BF16 or F64 tensors, with or without the prefix "transformer." and those of
// PyTorch's wrappers. Attention masks ("h.0.attn.bias") are ignored. UserError if a tensor is missing, has
// another shape, is not of this model or holds a value that is not finite. `with_state`: the optimizer's state as well,
// by its names in checkpoints (state_name); with `mends` it is corrected (Optimizer::mend). All ranks call it; rank 0
// finds the tensors. Returns a checksum of frozen weights by their names and numbers, the same for any files and
// mesh.
std::string load_stored(const std::function<StoredTensors()>& find, ParameterStore& store,
                        const UnitTransfer& transfer, Tensors tensors = Tensors::weights,
                        bool with_state = false, bool mends = false);

// The weights of a file or folder (find_tensors).
void load_weights(const std::filesystem::path& path, ParameterStore& store, const UnitTransfer& transfer);

}  // namespace llmc
