// A file's bytes in memory, read from the disk when they are looked at.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace llmc {

// Read-only, and mapped for the object's life, but not open: a dataset may have more files than a process may open.
class MappedFile {
  public:
    // UserError if there is no such file, or if it cannot be read, is no regular file or is empty. `option`
    // ("--train-data") begins its line.
    MappedFile(const std::string& path, const std::string& option);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::span<const std::uint8_t> bytes() const { return {data_, size_}; }

    // UserError if the file has been shortened since: to read bytes that are gone would kill the process.
    void require_whole() const;

  private:
    void map(int file, const std::string& option);

    std::string path_;
    dev_t device_ = 0;
    ino_t inode_ = 0;
    const std::uint8_t* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace llmc
