// Storage for the algorithms that a device chooses by autotuning (Device::choices). Measured times vary, so a
// second measurement may choose differently. So a run reuses stored choices, and a repeated run gives the
// same bits.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "llmc/device/device.h"
#include "llmc/io/checkpoint.h"

namespace llmc {

// The name of the file with a run's choices in its directory, and of the file with all choices in the user's
// cache.
inline constexpr const char* algorithms_file = "algorithms.txt";
// $XDG_CACHE_HOME/train_gpt/algorithms.txt; XDG_CACHE_HOME is ~/.cache by default. Throws UserError if
// neither XDG_CACHE_HOME nor HOME is set.
std::filesystem::path algorithms_cache();

// Both take and return texts for Device::adopt_choices(). merged_choices: all choices of both; the second
// wins where they differ. added_choices: the choices of `second` that are missing or different in `first`.
std::string merged_choices(std::string_view first, std::string_view second);
std::string added_choices(std::string_view first, std::string_view second);
std::int64_t number_of_choices(std::string_view text);
// The kind of device that the choices are for: the first line of Device::choices, or empty without choices.
std::string kind_of_choices(const Device& device);

// The algorithms of earlier runs. Only rank 0 reads and stores them.
struct Algorithms {
    // The checkpoint's choices come first, then those of the run's directory, then those of the cache.
    std::string earlier;
    std::filesystem::path origin;  // the first source with choices for this device; empty if there is none
    std::filesystem::path cache;   // empty if the cache cannot be written
    std::string why_not_kept;      // why the cache cannot be written
    std::string row() const;       // the row "algorithms" of the header
};
Algorithms find_algorithms(const std::optional<CheckpointInfo>& checkpoint,
                           const std::filesystem::path& out_dir, const Device& device);
// Adds the new choices of this run to the cache and returns their number. A failure to write is ignored.
// `name` is the suffix of a temporary file, so no other process may use it.
std::int64_t keep_algorithms(const Algorithms& found, std::string_view choices, std::string_view name);

}  // namespace llmc
