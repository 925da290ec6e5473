// The model's tensors in safetensors files, in the names and shapes of Hugging Face's: any of its tools
// reads an export, and a model from there is read here. Files hold the V true rows of the embedding, in fp32.
#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "llmc/parallel/parameter_store.h"
#include "llmc/parallel/unit_transfer.h"

namespace llmc {

// All ranks save and load; the root of the transfer alone has the file.

// One of the flat buffers of every unit: &UnitBuffers::master or ::updated_gradients, fp32. With `sync` the root
// returns only when the file is on the storage device.
void save_tensors(const std::filesystem::path& file, const ParameterStore& store, UnitTransfer& transfer,
                  Tensor UnitBuffers::*flat, bool sync);
inline void save_weights(const std::filesystem::path& file, const ParameterStore& store,
                         UnitTransfer& transfer, bool sync) {
    save_tensors(file, store, transfer, &UnitBuffers::master, sync);
}

// UserError if the file is no safetensors file, or its tensors are not those of a model of these units, by their names and
// shapes. Reads its header alone. Returns what a person should know of it, empty if nothing.
std::string check_weights(const std::filesystem::path& path, const Outline& outline,
                          std::span<const UnitLayout> units);

// Weights from F32, F16, BF16 or F64 tensors, with or without the prefix "transformer.". Attention masks
// ("h.0.attn.bias") are passed over. UserError if a tensor is missing, has another shape, is not of this
// model or holds a value that is not finite.
void load_weights(const std::filesystem::path& path, ParameterStore& store, UnitTransfer& transfer);

// AdamW's moments, as "<tensor>.exp_avg" and "<tensor>.exp_avg_sq", shaped as the weights are.
void save_moments(const std::filesystem::path& file, const ParameterStore& store, UnitTransfer& transfer,
                  bool sync);
void load_moments(const std::filesystem::path& file, Device& device, const ParameterStore& store,
                  UnitTransfer& transfer);

}  // namespace llmc
