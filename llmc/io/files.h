// File helpers: durable writes, checks before a run starts, checksums. All calls of the system by which a checkpoint or
// an export is written are here, so that a test can see them all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

// Functions that fail throw a UserError with the path and the system's reason.

// A file that is created, or replaced, and written from its beginning to its end.
class OutputFile {
  public:
    // Errors name it `named` if that is given.
    explicit OutputFile(const std::filesystem::path& path, const std::filesystem::path& named = {});
    ~OutputFile();
    OutputFile(const OutputFile&) = delete;
    OutputFile& operator=(const OutputFile&) = delete;

    void write(std::span<const std::byte> bytes);
    void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
    // Returns when what is written is on the storage device.
    void sync() const;
    // A file system may report only here that it could not write.
    void close();

  private:
    std::filesystem::path named_;
    int file_;
};

// A file that is read at any place.
class InputFile {
  public:
    explicit InputFile(const std::filesystem::path& path);
    ~InputFile();
    InputFile(const InputFile&) = delete;
    InputFile& operator=(const InputFile&) = delete;

    bool is_regular() const { return is_regular_; }
    std::uint64_t bytes() const { return bytes_; }  // when it was opened
    // A file may have been shortened since then. A read reports this; access to a mapping would crash.
    void read_at(std::uint64_t position, std::span<std::byte> out) const;

  private:
    std::filesystem::path path_;
    int file_;
    bool is_regular_;
    std::uint64_t bytes_;
};

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

// The checksums of the blocks of a file, of which the last may be shorter.
inline constexpr std::uint64_t checksum_block = std::uint64_t{4} << 20;
class BlockChecksums {
  public:
    BlockChecksums();
    ~BlockChecksums();
    BlockChecksums(const BlockChecksums&) = delete;
    BlockChecksums& operator=(const BlockChecksums&) = delete;

    // The file's next bytes.
    void add(std::span<const std::byte> bytes);
    // Those of all bytes so far. Call it once.
    std::vector<std::string> finish();

  private:
    struct State;
    void end_block();

    std::unique_ptr<State> state_;
    std::uint64_t in_block_ = 0;
    std::vector<std::string> blocks_;
};

// Checks before a run starts that its output can be written later. Leaves nothing behind. The directory, or a
// file's directory, need not exist yet.
void require_writable_directory(const std::filesystem::path& path);
// A folder with a random name in a directory, or in its nearest parent if it does not exist yet: other processes that
// find it by its place see the same directory. It is there while the object lives.
class FolderToken {
  public:
    explicit FolderToken(const std::filesystem::path& directory);
    ~FolderToken();
    FolderToken(const FolderToken&) = delete;
    FolderToken& operator=(const FolderToken&) = delete;

    // From the directory: "../../.train_gpt-a1b2c3".
    const std::filesystem::path& place() const { return place_; }

  private:
    std::filesystem::path path_, place_;
};
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

// Renames the directory `from` to `to`, and replaces an existing one, in one step if the file system can; durable on
// return. If it cannot, the old one has this suffix until the new one has its name.
inline constexpr std::string_view replaced_suffix = ".replaced";
void replace_directory(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace llmc
