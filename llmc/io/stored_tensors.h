// Where the tensors of a model lie in safetensors files: those of one file, of a folder in Hugging Face's format, of a
// folder of PyTorch's distributed checkpoints, or of our checkpoints. A tensor may be in boxes in several files.
// Headers alone say all of this.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/io/safetensors.h"

namespace llmc {

// Keys of a file's metadata: the second has, for each tensor of the file, the place of its box in the whole tensor, as
// JSON {"<tensor>": {"saved_offsets": [row, column]}, ...}.
inline constexpr const char *sharding_version_key = "DCP_VERSION", *sharding_version = "1.0",
                            *sharding_key = "DCP_SHARDING_INFO", *offsets_key = "saved_offsets";

struct StoredFile {
    std::filesystem::path path;
    std::uint64_t bytes = 0;
    std::vector<std::string> checksums;  // of its blocks (files.h); none: it is not verified
};

// UserError if these bytes, which begin at `begin`, are not the block whose checksum the file has there.
void require_checksum(const StoredFile& file, std::uint64_t begin, std::span<const std::byte> bytes);

struct StoredBox {
    std::size_t file = 0;        // its number
    std::uint64_t position = 0;  // of its first byte in the file
    std::string dtype;
    Shape shape;
    std::array<std::int64_t, 5> offsets{};  // in the whole tensor
};

struct StoredTensor {
    Shape shape;  // of the whole
    std::vector<StoredBox> boxes;
};

class StoredTensors {
  public:
    // `named`: the file or folder that messages name.
    explicit StoredTensors(const std::filesystem::path& named);

    // Adds what a file has, by its header, under its names or with a prefix before them. UserError if the file cannot
    // be read or is not complete, or if its tensors have no places in the whole.
    void add(const std::filesystem::path& file, std::vector<std::string> checksums = {},
             const std::string& prefix = "");
    // Call it when all files are added. UserError if the boxes of a tensor overlap, or do not cover it.
    void require_whole();

    const std::filesystem::path& named() const { return named_; }
    const std::vector<StoredFile>& files() const { return files_; }
    const std::map<std::string, StoredTensor, std::less<>>& tensors() const { return tensors_; }
    bool is_folder, is_model;  // whether it is a folder, and one in Hugging Face's format
    // A note for the user about files that are not read; empty if there is nothing to say.
    std::string note;

    // For the other ranks.
    std::string to_bytes() const;
    static StoredTensors from_bytes(const std::string& bytes);

  private:
    std::filesystem::path named_;
    std::vector<StoredFile> files_;
    std::map<std::string, StoredTensor, std::less<>> tensors_;
};

// Whether a directory holds a model in Hugging Face's format: a config.json, and no manifest or record of ours.
bool is_model_folder(const std::filesystem::path& path);
// Whether it holds a distributed checkpoint of PyTorch: its files have boxes. It may have a config.json.
bool is_sharded_folder(const std::filesystem::path& path);

// The tensors of a file, or of a folder of one of these two kinds. A folder in Hugging Face's format has
// model.safetensors, or else shards and their index, model.safetensors.index.json; its other files are passed over. Of
// a distributed checkpoint, all files are read. UserError as above, if the index does not agree with the files or names
// one outside the folder, and if the folder has no safetensors files.
StoredTensors find_tensors(const std::filesystem::path& path);

}  // namespace llmc
