// The tensors of a model in safetensors files: one file, or the files of a folder in Hugging Face's format.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/io/safetensors.h"

namespace llmc {

// Whether a directory holds a model in Hugging Face's format: a config.json, and no manifest or record of ours.
bool is_model_folder(const std::filesystem::path& path);

class WeightFiles {
  public:
    // A folder has model.safetensors, or else shards and their index, model.safetensors.index.json; its other
    // files are passed over. UserError if a file cannot be read or is not complete, if the index does not agree with
    // the files or names one outside the folder, and if the folder has no safetensors files.
    explicit WeightFiles(const std::filesystem::path& path);

    const std::vector<SafetensorsEntry>& entries() const { return entries_; }
    // A note for the user about files that are not read; empty if there is nothing to say.
    const std::string& note() const { return note_; }
    bool contains(std::string_view name) const { return files_.contains(name); }
    // As SafetensorsReader's.
    const SafetensorsEntry& entry(std::string_view name) const { return file_of(name).entry(name); }
    void read(std::string_view name, std::span<float> out) const { file_of(name).read(name, out); }

  private:
    void open(const std::filesystem::path& file);
    void open_shards(const std::filesystem::path& folder, const std::filesystem::path& index);
    const SafetensorsReader& file_of(std::string_view name) const;

    std::string path_, note_;
    std::vector<std::unique_ptr<const SafetensorsReader>> readers_;
    std::vector<SafetensorsEntry> entries_;
    std::map<std::string, const SafetensorsReader*, std::less<>> files_;
};

}  // namespace llmc
