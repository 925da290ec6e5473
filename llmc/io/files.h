// Small help with files: text written at once, what has been written made durable, checksums.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace llmc {

// All of these throw a UserError with the path and the system's reason.

// Creates or replaces a file; durable on return.
void write_file(const std::filesystem::path& path, std::string_view text);
// The same, so that the old file stays if the new one cannot be written: that is at first the path with `ending`.
void replace_file(const std::filesystem::path& path, std::string_view text,
                  std::string_view ending = ".partial");
// Of a regular file only: a pipe might never end, and have no writer to wait for.
std::string read_file(const std::filesystem::path& path);

// Makes the names in a directory durable.
void sync_directory(const std::filesystem::path& path);

// XXH3 (128 bits) of a file's bytes, in hexadecimal.
std::string checksum(const std::filesystem::path& path);
std::string checksum_of_text(std::string_view text);

// Whether what a run writes at its end could be written, before it starts; nothing stays behind. The directory, and
// that of a file, may still have to be created.
void require_writable_directory(const std::filesystem::path& path);
// A file that is opened and written, or a device that takes all ("/dev/null"); no pipe, which may have no reader.
void require_writable_file(const std::filesystem::path& path);
// Absolute, without . and .. and without a slash at its end, which would count as a name.
std::filesystem::path plain_path(const std::filesystem::path& path);

// A file that is written under another name and renamed.
void require_replaceable_file(const std::filesystem::path& path);
// That the disk on which the path lies, or would lie, has room for so many bytes beside those that a checkpoint takes
// of it.
void require_space(const std::filesystem::path& path, std::uint64_t bytes, std::uint64_t checkpoint = 0);
// Whether two paths lie, or would lie, on one disk.
bool on_one_disk(const std::filesystem::path& a, const std::filesystem::path& b);

// Creates the directory and its parents, if they are not there.
void make_directory(const std::filesystem::path& path);

// Gives the directory `from` the name `to`, replacing a directory of that name at once.
void replace_directory(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace llmc
