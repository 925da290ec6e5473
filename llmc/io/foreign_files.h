// Files that people give in place of a whole safetensors file, and what to do then.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace llmc {

// So many bytes from a file's beginning suffice to recognize it.
inline constexpr std::size_t bytes_to_recognize = 4096;

// Says what a file with this beginning is, and what to give instead. Empty for an unknown kind.
std::string recognize_foreign_file(std::string_view beginning);

// Whether the name is that of a shard, as in model-00001-of-00002.safetensors, and what to give instead.
bool is_one_of_several_shards(const std::filesystem::path& path);
std::string advice_for_shards();

}  // namespace llmc
