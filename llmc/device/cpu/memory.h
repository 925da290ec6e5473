// The memory that is still available to this machine or to the container of this process.
#pragma once

#include <cstddef>
#include <optional>

namespace llmc::cpu {

// Bytes that processes may still allocate without swapping, or empty if the system does not say. The page
// cache counts as free.
std::optional<std::size_t> available_memory();

}  // namespace llmc::cpu
