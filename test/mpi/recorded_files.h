// Records the calls of the system by which files below a folder change, and what a power cut could leave of them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace llmc::test {

struct FileCall {
    enum class Kind : std::uint8_t { create, write, sync, make_directory, rename, exchange, remove };
    Kind kind;
    std::int64_t time;  // in nanoseconds, the same clock on all ranks of a machine
    std::string path;   // below the folder
    std::string more;   // the bytes, or the new name
};

// Records this process's calls below the folder while it lives. One at a time.
class FileRecorder {
  public:
    explicit FileRecorder(const std::filesystem::path& folder);
    ~FileRecorder();
    FileRecorder(const FileRecorder&) = delete;
    FileRecorder& operator=(const FileRecorder&) = delete;

    const std::vector<FileCall>& calls() const;
    // Bytes that were read, by file.
    const std::map<std::string, std::uint64_t>& read() const;
};

// Whether renameat2 can exchange two names, as not every file system can.
void let_names_be_exchanged(bool can);

// Where `fails` says so for a path below the recorder's folder, a write fails as on a full disk. Empty: none does.
void let_writes_fail(std::function<bool(const std::string&)> fails);

// For each number of calls after which the power is cut: makes `scratch` what the disk may then hold, beginning with
// the files in `before`, and calls check(how many calls there were, the description of what was lost). Data that were
// not synced are lost. Names in a folder that was not synced since are there or not, all of a folder together.
void for_each_power_cut(const std::filesystem::path& before, const std::vector<FileCall>& calls,
                        const std::filesystem::path& scratch,
                        const std::function<void(std::size_t calls, const std::string& lost)>& check);

}  // namespace llmc::test
