// A file's bytes in memory, loaded from the disk on access.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace llmc {

// A read-only mapping for the object's life. The file itself is closed, because a dataset may have more files
// than a process may have open.
class MappedFile {
  public:
    // UserError if the file does not exist, cannot be read, is not a regular file or is empty. The message
    // begins with `option` ("--train-data").
    MappedFile(const std::string& path, const std::string& option);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::span<const std::uint8_t> bytes() const { return {data_, size_}; }

    // UserError if the file has become shorter: reading bytes that are gone would kill the process.
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
