// Where a run takes the algorithms from that its device chooses by measuring (Device::choices), so that runs repeat bit
// for bit, and where it keeps those that it measured itself: times differ from run to run, and with them the fastest.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "llmc/device/device.h"
#include "llmc/io/checkpoint.h"

namespace llmc {

// The file of a run's choices in its directory, and of all that were measured in the user's cache.
inline constexpr const char* algorithms_file = "algorithms.txt";
// $XDG_CACHE_HOME/train_gpt/algorithms.txt, with ~/.cache by default. UserError where the environment has neither.
std::filesystem::path algorithms_cache();

// Texts as Device::adopt_choices takes them: what both say, where they differ the second; and what only the second says.
std::string merged_choices(std::string_view first, std::string_view second);
std::string added_choices(std::string_view first, std::string_view second);
std::int64_t number_of_choices(std::string_view text);
// What a device's choices are for: the first line of Device::choices, empty where it has none.
std::string kind_of_choices(const Device& device);

// The algorithms of earlier runs. One process looks for them, and keeps new ones.
struct Algorithms {
    std::string
        earlier;  // those of the checkpoint count before the directory's, and these before the cache's
    std::filesystem::path origin;  // the first of these that has some for this device; empty if none has
    std::filesystem::path cache;   // empty where nothing can be kept
    std::string why_not_kept;      // then
    std::string row() const;       // for the header
};
Algorithms find_algorithms(const std::optional<CheckpointInfo>& checkpoint,
                           const std::filesystem::path& out_dir, const Device& device);
// Adds what the devices chose, and no earlier run, to the cache; nothing happens where that fails. Returns how many choices
// that are. `name`: another one than any other process has.
std::int64_t keep_algorithms(const Algorithms& found, std::string_view choices, std::string_view name);

}  // namespace llmc
