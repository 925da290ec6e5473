// Numbers as a person reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace llmc {

// "3.2 MiB"
std::string human_bytes(std::size_t bytes);
// "1,234,567"
std::string grouped(std::int64_t number);
// "1 process", "2 processes"
std::string plural(std::int64_t count, std::string_view singular, std::string_view ending = "s");

}  // namespace llmc
