// A file's bytes in memory, read from the disk when they are looked at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace llmc {

// Read-only, and mapped for the object's life. The file must not shrink meanwhile.
class MappedFile {
  public:
    // UserError if there is no such file, or if it cannot be read, is no regular file or is empty. `option`
    // ("--train-data") begins its line.
    MappedFile(const std::string& path, const std::string& option);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::span<const std::uint8_t> bytes() const { return {data_, size_}; }

  private:
    const std::uint8_t* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace llmc
