// File helpers: durable writes, checks before a run starts, checksums.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace llmc {

// Functions that fail throw a UserError with the path and the system's reason.

// Creates or replaces a file; durable on return.
void write_file(const std::filesystem::path& path, std::string_view text);
// The same, but keeps the old file if the new one cannot be written. Writes to the path with `ending` first.
void replace_file(const std::filesystem::path& path, std::string_view text,
                  std::string_view ending = ".partial");
// Reads a regular file only: a pipe may have no writer and may never end.
std::string read_file(const std::filesystem::path& path);

// Makes the names in a directory durable.
void sync_directory(const std::filesystem::path& path);

// XXH3 (128 bits) of a file's bytes, in hexadecimal.
std::string checksum(const std::filesystem::path& path);
std::string checksum_of_text(std::string_view text);

// Checks before a run starts that its output can be written later. Leaves nothing behind. The directory, or a
// file's directory, need not exist yet.
void require_writable_directory(const std::filesystem::path& path);
// Checks a file that will be opened and written, or a device that accepts all data ("/dev/null"). Refuses a
// pipe, which may have no reader.
void require_writable_file(const std::filesystem::path& path);
// The path as absolute, without . and .. and without a trailing slash, which would count as an empty last
// name.
std::filesystem::path plain_path(const std::filesystem::path& path);

// The path to which a symbolic link leads, also if nothing is there yet. It is the path itself if that is no link, or
// leads to itself. A file that is written under another name and renamed must be written there, or it would replace
// the link.
std::filesystem::path link_target(const std::filesystem::path& path);

// Checks a file that will be written under another name and renamed.
void require_replaceable_file(const std::filesystem::path& path);
// Checks that the disk of the path has room for `bytes` and for a checkpoint of `checkpoint` bytes as well.
// The path need not exist.
void require_space(const std::filesystem::path& path, std::uint64_t bytes, std::uint64_t checkpoint = 0);
// Whether two paths are on one disk; they need not exist.
bool on_one_disk(const std::filesystem::path& a, const std::filesystem::path& b);

// Creates the directory and its missing parents.
void make_directory(const std::filesystem::path& path);

// Renames the directory `from` to `to`, and replaces an existing one, in one step if the file system can.
void replace_directory(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace llmc
