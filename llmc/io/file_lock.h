// A lock that one process holds at a time, on this machine and on others that share the file system. It is a
// file that says who holds it. The system releases the lock when its holder ends, however that happens. The file
// of a holder that was killed stays, and locks nothing.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace llmc {

// The process that holds the lock of this file, as "process 12 on machine node3". Empty if no process does, or if
// the file cannot be read. Creates nothing, and is in no other process's way.
std::optional<std::string> lock_holder(const std::filesystem::path& file);

class FileLock {
  public:
    // Tries once to take the lock. Creates the file, and the folders that are missing.
    explicit FileLock(std::filesystem::path file);
    // Releases the lock and removes the file, and those of the new folders that are empty.
    ~FileLock();
    FileLock(FileLock&& other) noexcept;
    FileLock(const FileLock&) = delete;
    FileLock& operator=(const FileLock&) = delete;
    FileLock& operator=(FileLock&&) = delete;

    // Who holds the lock instead; empty if no other process does.
    const std::optional<std::string>& holder() const { return holder_; }
    // Why the system gave no lock, although no other process holds it; otherwise empty.
    const std::string& fault() const { return fault_; }

  private:
    void make_folders();
    void take();

    std::filesystem::path file_;
    std::vector<std::filesystem::path> new_folders_;  // the innermost first
    int descriptor_ = -1;                             // open while the lock is held
    std::optional<std::string> holder_;
    std::string fault_;
};

}  // namespace llmc
