// Small help with files: text written at once, what has been written made durable, checksums.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace llmc {

// All of these throw a UserError with the path and the system's reason.

// Creates or replaces a file; durable on return.
void write_file(const std::filesystem::path& path, std::string_view text);
std::string read_file(const std::filesystem::path& path);

// Makes the names in a directory durable.
void sync_directory(const std::filesystem::path& path);

// XXH3 (128 bits) of a file's bytes, in hexadecimal.
std::string checksum(const std::filesystem::path& path);

// Creates the directory and its parents, if they are not there.
void make_directory(const std::filesystem::path& path);

// Gives the directory `from` the name `to`, replacing a directory of that name at once.
void replace_directory(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace llmc
